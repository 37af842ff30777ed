// Which markers open and close semantic blocks in the output of a model, compiled for one look-up a byte.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "marker_automaton.h"

namespace agentspec {

struct BlockRule {
  enum class Anchor { kAnywhere = 0, kLine = 1, kOutput = 2 };

  std::string name;                       // "text": opens nothing, only ends the open-ended blocks that it stands in
  std::vector<std::string> starts;        // at least one, none empty
  std::vector<std::string> ends;          // none empty, may equal a start; no end at all: the block is open-ended
  std::vector<std::string> parents;       // names of the rules that may hold it; "text" is the top level
  Anchor anchor = Anchor::kAnywhere;      // where a start marker counts: only at the start of a line, of the output
  std::vector<std::string> name_marks{};  // what stands right before a tool's name in it; empty: a start marker does
};

// A set of bytes as bits: each of the usual marker's bytes has one of its own, some others share one.
uint64_t ByteBit(uint8_t byte);

// Immutable; the trackers of all requests share it.
class Grammar {
 public:
  using State = MarkerAutomaton::State;
  static constexpr State kRoot = MarkerAutomaton::kRoot;
  static constexpr int kTopLevel = -1;  // no rule: outside all blocks
  static constexpr int kNoRule = -2;
  static constexpr size_t kMaxRules = 60;
  static constexpr size_t kMaxMarkerBytes = 4096;

  // The markers that are complete at one byte.
  struct Event {
    uint64_t ends = 0;        // bit: rule that one of them closes
    std::vector<int> starts;  // rules that they open, the longest marker first
    bool Ends(int rule) const { return rule >= 0 && (ends >> rule & 1) != 0; }
  };

  // `answer_starts`: what a prompt holds right before the model's answer. Throws std::invalid_argument: an empty name
  // or marker, a rule without a start marker, an unknown parent, more than kMaxRules or kMaxMarkerBytes.
  Grammar(std::vector<BlockRule> rules, std::vector<std::string> answer_starts);

  State Next(State state, uint8_t byte) const { return markers_.Next(state, byte); }
  // The markers that are complete in `state`; nullptr: none is.
  const Event* Found(State state) const {
    uint16_t set = markers_.Found(state);
    return set == 0 ? nullptr : &events_[set];
  }
  State AtOutputStart() const { return markers_.Next(kRoot, MarkerAutomaton::kOutputStart); }
  // After a marker that counted: nothing of it is remembered but a line's end.
  State After(uint8_t last_byte) const { return last_byte == '\n' ? markers_.Next(kRoot, '\n') : kRoot; }

  State NextName(State state, uint8_t byte) const { return names_.Next(state, byte); }
  // A tool's name starts after `state` in a block of `rule`.
  bool StartsName(State state, int rule) const { return (name_rules_[names_.Found(state)] >> rule & 1) != 0; }
  bool StartsWithName(int rule) const { return (starts_with_name_ >> rule & 1) != 0; }
  bool HasName(int rule) const { return !rules_[rule].name_marks.empty(); }

  // The rule with the longest start marker of the event that may stand in `holder`; kNoRule if none.
  int Opens(const Event& event, int holder) const;
  bool MayStandIn(int rule, int holder) const { return (allowed_in_[rule] >> (holder + 1) & 1) != 0; }
  bool IsOpenEnded(int rule) const { return rule >= 0 && rules_[rule].ends.empty(); }
  // A marker opens and closes it, so that it can't be read from the middle of a text.
  bool IsToggle(int rule) const { return rule >= 0 && (toggles_ >> rule & 1) != 0; }
  bool IsText(int rule) const { return rules_[rule].name == kTopLevelName; }
  // The first rule of that name; kNoRule if unknown.
  int Find(std::string_view name) const;
  const std::string& name(int rule) const { return rules_[rule].name; }
  const std::vector<std::string>& answer_starts() const { return answer_starts_; }
  // Bits of the bytes that a marker may begin with.
  uint64_t first_bytes() const { return first_bytes_; }
  size_t MemoryBytes() const;

 private:
  static constexpr std::string_view kTopLevelName = "text";

  void AllowParents();
  void AddBlockMarkers();
  void AddNameMarks();

  std::vector<BlockRule> rules_;
  std::vector<std::string> answer_starts_;
  std::vector<uint64_t> allowed_in_;  // by rule; bit holder + 1 (bit 0: top level)
  uint64_t starts_with_name_ = 0;     // bit: rule
  uint64_t toggles_ = 0;              // bit: rule
  uint64_t first_bytes_ = 0;
  MarkerAutomaton markers_{{}};
  std::vector<Event> events_;  // by number of the set of markers
  MarkerAutomaton names_{{}};
  std::vector<uint64_t> name_rules_;  // by number of the set of name marks; bit: rule
};

// Grammars by number; number 0 is the server's own, which stays.
class GrammarTable {
 public:
  static constexpr size_t kMaxBytes = size_t{8} << 20;  // of all of them

  // Throws std::invalid_argument: `own` is larger than kMaxBytes.
  explicit GrammarTable(Grammar own);

  // Its number; -1: all together would exceed kMaxBytes.
  int Add(Grammar grammar);
  // A request that is open keeps its grammar.
  void Remove(int id);
  // The server's own if the number is unknown.
  std::shared_ptr<const Grammar> Find(int id) const;
  size_t MemoryBytes() const { return num_bytes_; }

 private:
  std::map<int, std::shared_ptr<const Grammar>> grammars_;
  int next_id_ = 0;
  size_t num_bytes_ = 0;
};

}  // namespace agentspec
