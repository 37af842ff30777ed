#include "marker_automaton.h"

#include <queue>

namespace agentspec {

MarkerAutomaton::MarkerAutomaton(const std::vector<Marker>& markers) {
  for (const auto& marker : markers)
    for (Symbol symbol : marker)
      if (class_of_[symbol] == 0) class_of_[symbol] = static_cast<uint16_t>(num_classes_++);
  Add(markers);
  LinkFailures();
}

void MarkerAutomaton::Add(const std::vector<Marker>& markers) {
  std::vector<std::vector<uint16_t>> complete(1);  // by state: the markers that end there
  next_.resize(num_classes_);
  for (size_t index = 0; index < markers.size(); ++index) {
    size_t state = kRoot;
    for (Symbol symbol : markers[index]) {
      size_t edge = state * num_classes_ + class_of_[symbol];
      if (next_[edge] == kRoot) {
        next_[edge] = static_cast<State>(complete.size());
        complete.emplace_back();
        next_.resize(next_.size() + num_classes_);
      }
      state = next_[edge];
    }
    complete[state].push_back(static_cast<uint16_t>(index));
  }
  sets_.emplace_back();
  for (auto& set : complete) {
    found_.push_back(set.empty() ? 0 : static_cast<uint16_t>(sets_.size()));
    if (!set.empty()) sets_.push_back(std::move(set));
  }
}

void MarkerAutomaton::LinkFailures() {
  std::vector<State> failure(found_.size(), kRoot);
  std::queue<State> breadth_first;
  for (size_t edge = 0; edge < num_classes_; ++edge)
    if (next_[edge] != kRoot) breadth_first.push(next_[edge]);
  for (; !breadth_first.empty(); breadth_first.pop()) {
    State state = breadth_first.front();
    State shorter = failure[state];
    if (found_[state] == 0) {
      found_[state] = found_[shorter];
    } else {
      auto& set = sets_[found_[state]];
      const auto& suffixes = sets_[found_[shorter]];
      set.insert(set.end(), suffixes.begin(), suffixes.end());
    }
    for (size_t symbol_class = 0; symbol_class < num_classes_; ++symbol_class) {
      State& target = next_[state * num_classes_ + symbol_class];
      State fallback = next_[shorter * num_classes_ + symbol_class];
      if (target == kRoot) {
        target = fallback;
      } else {
        failure[target] = fallback;
        breadth_first.push(target);
      }
    }
  }
}

size_t MarkerAutomaton::MemoryBytes() const {
  size_t num_bytes = sizeof(*this) + next_.capacity() * sizeof(State) + found_.capacity() * sizeof(uint16_t);
  for (const auto& set : sets_) num_bytes += sizeof(set) + set.capacity() * sizeof(uint16_t);
  return num_bytes;
}

}  // namespace agentspec
