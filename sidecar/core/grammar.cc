#include "grammar.h"

#include <algorithm>
#include <queue>
#include <stdexcept>

namespace agentspec {

namespace {
constexpr size_t kMaxRules = 60;
constexpr size_t kMaxMarkerBytes = 60000;
constexpr Grammar::State kMissing = 0xFFFF;
}  // namespace

Grammar::Grammar(std::vector<BlockRule> rules) : rules_(std::move(rules)) {
  size_t num_bytes = 0;
  for (const auto& rule : rules_) {
    if (rule.name.empty() || rule.start.empty() || rule.end.empty())
      throw std::invalid_argument("grammar: name, start and end of rule '" + rule.name + "' must not be empty");
    num_bytes += rule.start.size() + rule.end.size();
  }
  if (rules_.size() > kMaxRules || num_bytes > kMaxMarkerBytes)
    throw std::invalid_argument("grammar: expected at most 60 rules and 60000 marker bytes, got " +
                                std::to_string(rules_.size()) + " and " + std::to_string(num_bytes));
  next_.emplace_back().fill(kMissing);
  std::vector<State> start_states, end_states;
  for (const auto& rule : rules_) {
    start_states.push_back(AddMarker(rule.start));
    end_states.push_back(AddMarker(rule.end));
    uint64_t allowed = 0;
    for (const auto& parent : rule.parents) {
      if (parent == "text") allowed |= 1;
      for (size_t index = 0; index < rules_.size(); ++index)
        if (rules_[index].name == parent) allowed |= uint64_t{2} << index;
      if (parent != "text" && Find(parent) == kNoRule)
        throw std::invalid_argument("grammar: rule '" + rule.name + "' has the unknown parent '" + parent + "'");
    }
    allowed_in_.push_back(allowed);
  }
  starts_.resize(next_.size());
  ends_.resize(next_.size());
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    starts_[start_states[rule]].push_back(static_cast<int>(rule));
    ends_[end_states[rule]].push_back(static_cast<int>(rule));
  }
  LinkFailures();
}

Grammar::State Grammar::AddMarker(const std::string& marker) {
  State state = kRoot;
  for (char character : marker) {
    auto byte = static_cast<uint8_t>(character);
    if (next_[state][byte] == kMissing) {
      next_[state][byte] = static_cast<State>(next_.size());
      next_.emplace_back().fill(kMissing);
    }
    state = next_[state][byte];
  }
  return state;
}

void Grammar::LinkFailures() {
  std::vector<State> failure(next_.size(), kRoot);
  std::queue<State> breadth_first;
  for (auto& target : next_[kRoot]) {
    if (target == kMissing)
      target = kRoot;
    else
      breadth_first.push(target);
  }
  for (; !breadth_first.empty(); breadth_first.pop()) {
    State state = breadth_first.front();
    State shorter = failure[state];
    starts_[state].insert(starts_[state].end(), starts_[shorter].begin(), starts_[shorter].end());
    ends_[state].insert(ends_[state].end(), ends_[shorter].begin(), ends_[shorter].end());
    for (int byte = 0; byte < 256; ++byte) {
      State& target = next_[state][byte];
      if (target == kMissing) {
        target = next_[shorter][byte];
      } else {
        failure[target] = next_[shorter][byte];
        breadth_first.push(target);
      }
    }
  }
  for (size_t state = 0; state < next_.size(); ++state)
    has_marker_.push_back(!starts_[state].empty() || !ends_[state].empty());
}

bool Grammar::Closes(State state, int top) const {
  return std::find(ends_[state].begin(), ends_[state].end(), top) != ends_[state].end();
}

int Grammar::Opens(State state, int top) const {
  int parent = std::max(top, kTopLevel);  // a block of the application's own holds what the top level may hold
  for (int rule : starts_[state])
    if (allowed_in_[rule] >> (parent + 1) & 1) return rule;
  return kNoRule;
}

int Grammar::Find(const std::string& name) const {
  for (size_t rule = 0; rule < rules_.size(); ++rule)
    if (rules_[rule].name == name) return static_cast<int>(rule);
  return kNoRule;
}

}  // namespace agentspec
