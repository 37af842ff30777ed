#include "grammar.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace agentspec {

namespace {

using Marker = MarkerAutomaton::Marker;

[[noreturn]] void Refuse(const std::string& what) { throw std::invalid_argument("grammar: " + what); }

Marker ToMarker(std::string_view text) {
  Marker marker;
  for (char byte : text) marker.push_back(static_cast<uint8_t>(byte));
  return marker;
}

// A start marker where its anchor lets it count.
std::vector<Marker> Anchored(const std::string& start, BlockRule::Anchor anchor) {
  if (anchor == BlockRule::Anchor::kAnywhere) return {ToMarker(start)};
  Marker at_output = ToMarker(start);
  at_output.insert(at_output.begin(), MarkerAutomaton::kOutputStart);
  if (anchor == BlockRule::Anchor::kOutput) return {at_output};
  return {at_output, ToMarker("\n" + start)};
}

std::vector<BlockRule> Checked(std::vector<BlockRule> rules, const std::vector<std::string>& answer_starts) {
  size_t num_bytes = 0;
  auto count = [&num_bytes](const std::vector<std::string>& markers) {
    for (const auto& marker : markers) num_bytes += marker.size();
  };
  auto has_empty = [](const std::vector<std::string>& markers) {
    return std::any_of(markers.begin(), markers.end(), [](const auto& marker) { return marker.empty(); });
  };
  for (const auto& rule : rules) {
    if (rule.name.empty()) Refuse("a rule's name must not be empty");
    if (rule.starts.empty()) Refuse("rule '" + rule.name + "' has no start marker");
    if (has_empty(rule.starts) || has_empty(rule.ends)) Refuse("rule '" + rule.name + "' has an empty marker");
    for (const auto* markers : {&rule.starts, &rule.ends, &rule.name_marks}) count(*markers);
  }
  if (has_empty(answer_starts)) Refuse("an answer start is empty");
  count(answer_starts);
  if (rules.size() > Grammar::kMaxRules || num_bytes > Grammar::kMaxMarkerBytes)
    Refuse("expected at most " + std::to_string(Grammar::kMaxRules) + " rules and " +
           std::to_string(Grammar::kMaxMarkerBytes) + " marker bytes, got " + std::to_string(rules.size()) + " and " +
           std::to_string(num_bytes));
  return rules;
}

constexpr std::array<uint8_t, 256> NumberBytes() {
  std::array<uint8_t, 256> numbers{};
  uint8_t next = 29;
  for (int byte = 0; byte < 256; ++byte) {
    int lower = byte | 32;
    if (lower >= 'a' && lower <= 'z')
      numbers[byte] = static_cast<uint8_t>(lower - 'a');
    else if (byte >= '0' && byte <= '9')
      numbers[byte] = 26;
    else if (byte >= 127)
      numbers[byte] = 27;
    else if (byte < ' ' && byte != '\n')
      numbers[byte] = 28;
    else
      numbers[byte] = next++;  // 34 of them
  }
  return numbers;
}

}  // namespace

uint64_t ByteBit(uint8_t byte) {
  static constexpr auto kNumbers = NumberBytes();
  return uint64_t{1} << kNumbers[byte];
}

Grammar::Grammar(std::vector<BlockRule> rules, std::vector<std::string> answer_starts)
    : rules_(Checked(std::move(rules), answer_starts)), answer_starts_(std::move(answer_starts)) {
  AllowParents();
  AddBlockMarkers();
  AddNameMarks();
}

void Grammar::AllowParents() {
  for (const auto& rule : rules_) {
    uint64_t allowed = 0;
    for (const auto& parent : rule.parents) {
      uint64_t holders = parent == kTopLevelName ? 1 : 0;
      for (size_t holder = 0; holder < rules_.size(); ++holder)
        if (rules_[holder].name == parent) holders |= uint64_t{2} << holder;
      if (holders == 0) Refuse("rule '" + rule.name + "' has the unknown parent '" + parent + "'");
      allowed |= holders;
    }
    allowed_in_.push_back(allowed);
  }
}

void Grammar::AddBlockMarkers() {
  std::vector<Marker> markers;
  std::vector<std::pair<int, bool>> roles;  // of each marker: its rule; is it an end?
  for (int index = 0; index < static_cast<int>(rules_.size()); ++index) {
    const auto& rule = rules_[index];
    for (const auto& start : rule.starts) {
      for (auto& marker : Anchored(start, rule.anchor)) {
        markers.push_back(std::move(marker));
        roles.emplace_back(index, false);
      }
    }
    for (const auto& end : rule.ends) {
      markers.push_back(ToMarker(end));
      roles.emplace_back(index, true);
      bool is_start = std::find(rule.starts.begin(), rule.starts.end(), end) != rule.starts.end();
      toggles_ |= uint64_t{is_start} << index;
    }
  }
  markers_ = MarkerAutomaton(markers);
  for (const auto& set : markers_.sets()) {
    Event& event = events_.emplace_back();
    for (uint16_t marker : set) {
      auto [rule, is_end] = roles[marker];
      if (is_end)
        event.ends |= uint64_t{1} << rule;
      else
        event.starts.push_back(rule);
    }
  }
  for (int byte = 0; byte < 256; ++byte)
    if (Next(kRoot, static_cast<uint8_t>(byte)) != kRoot) first_bytes_ |= ByteBit(static_cast<uint8_t>(byte));
}

void Grammar::AddNameMarks() {
  std::vector<Marker> markers;
  std::vector<size_t> rules;  // of each mark
  for (size_t index = 0; index < rules_.size(); ++index) {
    for (const auto& mark : rules_[index].name_marks) {
      if (mark.empty()) {
        starts_with_name_ |= uint64_t{1} << index;
      } else {
        markers.push_back(ToMarker(mark));
        rules.push_back(index);
      }
    }
  }
  names_ = MarkerAutomaton(markers);
  for (const auto& set : names_.sets()) {
    uint64_t& name_rules = name_rules_.emplace_back(0);
    for (uint16_t mark : set) name_rules |= uint64_t{1} << rules[mark];
  }
}

int Grammar::Opens(const Event& event, int holder) const {
  holder = std::max(holder, kTopLevel);  // a block of the application's own holds what the top level may hold
  for (int rule : event.starts)
    if (MayStandIn(rule, holder)) return rule;
  return kNoRule;
}

int Grammar::Find(std::string_view name) const {
  for (size_t rule = 0; rule < rules_.size(); ++rule)
    if (rules_[rule].name == name) return static_cast<int>(rule);
  return kNoRule;
}

size_t Grammar::MemoryBytes() const {
  size_t num_bytes = sizeof(*this) + markers_.MemoryBytes() + names_.MemoryBytes();
  num_bytes += (allowed_in_.capacity() + name_rules_.capacity()) * sizeof(uint64_t);
  for (const auto& event : events_) num_bytes += sizeof(event) + event.starts.capacity() * sizeof(int);
  auto add = [&num_bytes](const std::vector<std::string>& texts) {
    for (const auto& text : texts) num_bytes += sizeof(text) + text.capacity();
  };
  for (const auto& rule : rules_) {
    num_bytes += sizeof(rule);
    for (const auto* texts : {&rule.starts, &rule.ends, &rule.parents, &rule.name_marks}) add(*texts);
  }
  add(answer_starts_);
  return num_bytes;
}

GrammarTable::GrammarTable(Grammar own) {
  if (Add(std::move(own)) != 0) Refuse("larger than " + std::to_string(kMaxBytes) + " bytes");
}

int GrammarTable::Add(Grammar grammar) {
  size_t num_bytes = grammar.MemoryBytes();
  if (num_bytes_ + num_bytes > kMaxBytes) return -1;
  num_bytes_ += num_bytes;
  grammars_.emplace(next_id_, std::make_shared<const Grammar>(std::move(grammar)));
  return next_id_++;
}

void GrammarTable::Remove(int id) {
  auto found = grammars_.find(id);
  if (id == 0 || found == grammars_.end()) return;
  num_bytes_ -= found->second->MemoryBytes();
  grammars_.erase(found);
}

std::shared_ptr<const Grammar> GrammarTable::Find(int id) const {
  auto found = grammars_.find(id);
  return found == grammars_.end() ? grammars_.at(0) : found->second;
}

}  // namespace agentspec
