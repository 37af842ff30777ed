// Follows the semantic block of one request's output: a pushdown automaton over the bytes of its tokens.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "grammar.h"
#include "types.h"

namespace agentspec {

// Block paths as small numbers. Label 0 is the top level ("text").
class LabelTable {
 public:
  static constexpr Label kTop = 0;
  static constexpr size_t kMaxLabels = 4096;
  static constexpr uint16_t kMaxToolsPerLabel = 512;

  LabelTable() : entries_{{kTop, "text"}} {}

  // The path `parent` + "/" + `name`; when the table is full, one shared label named "other".
  Label Child(Label parent, std::string_view name);
  // The same for a tool's name, of which a label has no more than kMaxToolsPerLabel; the others share one, "other".
  Label Tool(Label parent, std::string_view name);
  std::string Path(Label label) const;
  // The label of a path that Path() has written.
  Label Find(std::string_view path);

 private:
  struct Entry {
    Label parent;
    std::string name;
    uint16_t num_tools = 0;
  };
  static std::string Key(Label parent, std::string_view name);

  std::vector<Entry> entries_;
  std::unordered_map<std::string, Label> children_;  // "<parent>/<name>" -> label
};

// The bytes of every token id.
class Vocabulary {
 public:
  // `offsets` has one entry more than there are tokens; token i is bytes[offsets[i]:offsets[i + 1]].
  // Throws std::invalid_argument: offsets that do not fit the bytes.
  Vocabulary(std::string bytes, std::vector<int64_t> offsets);

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  uint64_t fingerprint() const { return fingerprint_; }  // of all tokens' bytes, in order
  std::string_view Bytes(Token token) const {
    return std::string_view(bytes_).substr(offsets_[token], offsets_[token + 1] - offsets_[token]);
  }
  // No byte of the token may begin a marker: from the automaton's root it leads back there.
  bool IsInert(Token token, const Grammar& grammar) const { return (byte_bits_[token] & grammar.first_bytes()) == 0; }
  // The last `num_bytes` bytes of a text, or all of it.
  std::string Tail(std::span<const Token> tokens, size_t num_bytes) const;

 private:
  std::string bytes_;
  std::vector<int64_t> offsets_;
  std::vector<uint64_t> byte_bits_;  // by token: ByteBit of its bytes
  uint64_t fingerprint_;
};

// What is known of the block at the first output token: the path of the tag counts, else what the prompt ends in, else
// the request.
struct BlockStart {
  std::string_view path{};          // such as "tool_call/search"; names that are no rule refine the block before them
  std::span<const Token> prompt{};  // template or prefill may open a block, such as "<think>" or "Thought:"
  bool is_structured = false;       // the answer is bare JSON: a tool call without its markers
  std::string_view tool{};          // the tool that must be called, if the request names one
};

class BlockTracker {
 public:
  static constexpr int kMaxDepth = 16;
  static constexpr size_t kMaxNameBytes = 64;      // of a tool's name; a longer one does not refine the path
  static constexpr uint16_t kMaxNameOffset = 256;  // bytes of a tool call in which its name is looked for
  static constexpr size_t kMaxPromptBytes = 512;   // of a prompt's end that are read for its last answer's start

  BlockTracker(const Vocabulary& vocabulary, const Grammar& grammar, LabelTable& labels, const BlockStart& start);

  // Takes one output token; returns true if a block began, ended or got its tool's name in it. Never fails, see
  // num_recoveries.
  bool Advance(const Vocabulary& vocabulary, const Grammar& grammar, LabelTable& labels, Token token) {
    if (state_ == Grammar::kRoot && name_bytes_left_ == 0 && vocabulary.IsInert(token, grammar)) return false;
    return Read(vocabulary.Bytes(token), grammar, labels);
  }
  Label label() const { return stack_[depth_].label; }
  // Blocks that were still open when one around them ended, end markers of no open block, starts beyond kMaxDepth.
  uint32_t num_recoveries() const { return num_recoveries_; }

 private:
  struct Frame {
    int rule;  // Grammar::kTopLevel at the bottom; kNoRule for a block that no marker closes
    Label label;
  };

  void EnterPath(std::string_view path, const Grammar& grammar, LabelTable& labels);
  void ReadPrompt(std::string_view tail, const Grammar& grammar, LabelTable& labels);
  bool Read(std::string_view bytes, const Grammar& grammar, LabelTable& labels);
  // Returns false if the markers mean nothing here.
  bool TakeMarkers(const Grammar::Event& event, const Grammar& grammar, LabelTable& labels);
  // Opens a block in that of `depth`; those above it are over.
  void Open(int rule, int depth, const Grammar& grammar, LabelTable& labels);
  void Close(int depth, const Grammar& grammar);
  void Push(int rule, Label label);
  void ReadName(uint8_t byte, const Grammar& grammar, LabelTable& labels);

  std::array<Frame, kMaxDepth + 1> stack_;  // open blocks, outermost first
  int depth_ = 0;
  Grammar::State state_;
  bool has_changed_ = false;  // in the token that is being read
  // The innermost block's tool: bytes in which its name may still come, the name as far as it is out.
  uint16_t name_bytes_left_ = 0;
  bool is_in_name_ = false;
  uint8_t name_length_ = 0;
  Grammar::State name_state_ = Grammar::kRoot;
  std::array<char, kMaxNameBytes> name_;
  uint32_t num_recoveries_ = 0;
};

}  // namespace agentspec
