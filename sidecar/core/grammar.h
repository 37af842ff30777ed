// Which markers open and close semantic blocks: one Aho-Corasick automaton over the bytes of the output.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace agentspec {

struct BlockRule {
  std::string name;
  std::string start;                 // never empty
  std::string end;                   // never empty; may equal start
  std::vector<std::string> parents;  // names of the rules that may hold it; "text" is the top level
};

class Grammar {
 public:
  using State = uint16_t;
  static constexpr State kRoot = 0;
  static constexpr int kTopLevel = -1;  // no rule: outside all blocks
  static constexpr int kNoRule = -2;

  // Throws std::invalid_argument: an empty marker, an unknown parent, more than 60 rules or 60,000 marker bytes.
  explicit Grammar(std::vector<BlockRule> rules);

  State Next(State state, uint8_t byte) const { return next_[state][byte]; }
  bool HasMarker(State state) const { return has_marker_[state]; }
  // The rule whose end marker is complete in `state` is `top`.
  bool Closes(State state, int top) const;
  // The rule with the longest start marker complete in `state` that may stand in `top`; kNoRule if none.
  int Opens(State state, int top) const;
  // Rule by name; kNoRule if unknown.
  int Find(const std::string& name) const;
  const std::string& name(int rule) const { return rules_[rule].name; }

 private:
  State AddMarker(const std::string& marker);
  void LinkFailures();

  std::vector<BlockRule> rules_;
  std::vector<uint64_t> allowed_in_;  // bit top + 1: the rule may stand in that rule (bit 0: top level)
  std::vector<std::array<State, 256>> next_;
  std::vector<uint8_t> has_marker_;
  std::vector<std::vector<int>> starts_;  // by state: rules whose start marker is complete, longest first
  std::vector<std::vector<int>> ends_;    // by state: rules whose end marker is complete
};

}  // namespace agentspec
