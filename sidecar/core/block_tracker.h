// Follows the semantic block of one request's output: a pushdown automaton over the bytes of its tokens.
#pragma once

#include <array>
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

  LabelTable() : entries_{{kTop, "text"}} {}

  // The path `parent` + "/" + `name`; when the table is full, one shared label named "other".
  Label Child(Label parent, std::string_view name);
  std::string Path(Label label) const;
  // The label of a path that Path() has written.
  Label Find(std::string_view path);

 private:
  struct Entry {
    Label parent;
    std::string name;
  };
  std::vector<Entry> entries_;
  std::unordered_map<std::string, Label> children_;  // "<parent>/<name>" -> label
};

// The bytes of every token id, and which tokens can never touch a marker.
class Vocabulary {
 public:
  // `offsets` has one entry more than there are tokens; token i is bytes[offsets[i]:offsets[i + 1]].
  // Throws std::invalid_argument: offsets that do not fit the bytes.
  Vocabulary(std::string bytes, std::vector<int64_t> offsets, const Grammar& grammar);

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  uint64_t fingerprint() const { return fingerprint_; }  // of all tokens' bytes, in order
  std::string_view Bytes(Token token) const {
    return std::string_view(bytes_).substr(offsets_[token], offsets_[token + 1] - offsets_[token]);
  }
  // From the automaton's root the token leads back to the root without meeting a marker's first byte.
  bool IsInert(Token token) const { return is_inert_[token]; }

 private:
  std::string bytes_;
  std::vector<int64_t> offsets_;
  std::vector<uint8_t> is_inert_;
  uint64_t fingerprint_;
};

class BlockTracker {
 public:
  static constexpr int kMaxDepth = 16;

  // `start_path` is the block at the first token, such as "tool_call/search"; names that are no rule of the grammar
  // refine the block before them. Empty = top level.
  BlockTracker(const Grammar& grammar, LabelTable& labels, std::string_view start_path);

  // Takes one output token; returns true when the block is another one after it. Never fails: a start beyond
  // kMaxDepth is ignored, a stray end marker is text.
  bool Advance(const Vocabulary& vocabulary, const Grammar& grammar, LabelTable& labels, Token token);
  Label label() const { return stack_[depth_].label; }

 private:
  struct Frame {
    int rule;  // Grammar::kTopLevel at the bottom; kNoRule for a block that no marker closes
    Label label;
  };
  void Push(int rule, Label label);

  std::array<Frame, kMaxDepth + 1> stack_;  // open blocks, outermost first
  int depth_ = 0;
  Grammar::State state_ = Grammar::kRoot;
};

}  // namespace agentspec
