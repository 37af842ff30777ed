// Blocks on their way between engines: what this one's requests have written, and how far others' texts have come.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "archive.h"
#include "history.h"
#include "types.h"

namespace agentspec {

// A stretch of one text: a block that was closed, or as much of an open one as has come since.
struct Segment {
  uint32_t writer;  // number of the text in the engine that wrote it
  uint32_t offset;  // tokens and block starts of the text before it
  bool is_end;      // nothing follows
  std::string stage;
  ArchivedText text;
};

// Segments of one namespace as bytes; who carries them sees to it that they arrive unchanged.
struct SegmentBatch {
  std::string history_namespace;
  size_t num_segments = 0;
  size_t num_tokens = 0;
  std::string bytes;
};

// Throws ArchiveError: another version, or not what Outbox::Take has written.
std::vector<Segment> ReadSegments(std::string_view bytes, int32_t vocab_size);

// What waits to be taken to other engines, in the order in which it was written; of too much the oldest is dropped.
class Outbox {
 public:
  // Nothing is kept before this is called.
  void Open(size_t max_tokens) { max_tokens_ = max_tokens; }
  bool is_open() const { return max_tokens_ > 0; }
  bool is_empty() const { return segments_.empty() && namespaces_.empty(); }
  void Push(const std::string& history_namespace, Segment segment);
  // Notes that a namespace is in use; of too many some are passed over until they are used again.
  void Use(const std::string& history_namespace) {
    if (namespaces_.size() < kMaxNamespaces) namespaces_.insert(history_namespace);
  }
  // All segments, by namespace and at most `max_tokens` or so in a batch, and the namespaces in use since the last
  // call.
  std::vector<SegmentBatch> Take(size_t max_tokens, std::vector<std::string>& namespaces);
  // Forgets those of a namespace and of those within it.
  void Delete(std::string_view history_namespace);
  uint64_t num_dropped_tokens() const { return num_dropped_tokens_; }

 private:
  static constexpr size_t kMaxNamespaces = 1 << 16;
  struct Waiting {
    std::string history_namespace;
    Segment segment;
  };
  std::deque<Waiting> segments_;
  std::unordered_set<std::string> namespaces_;
  size_t num_tokens_ = 0;
  size_t max_tokens_ = 0;
  uint64_t num_dropped_tokens_ = 0;
};

// A text of another engine that may go on.
struct ForeignText {
  std::weak_ptr<History> history;  // weak: it may be forgotten as if nobody used it
  History::Chain chain;
  TextWindow window;
  TextSource source;
  uint32_t num_tokens;  // and block starts, so far
};

// The foreign texts heard of last. One that is forgotten goes on without its context.
class ForeignTexts {
 public:
  struct Key {
    uint64_t origin;  // of the engine
    uint32_t writer;
    bool operator==(const Key&) const = default;
  };
  // nullptr: none.
  ForeignText* Find(const Key& key);
  ForeignText& Insert(const Key& key, ForeignText text);
  void Erase(const Key& key);

 private:
  static constexpr size_t kMaxTexts = 4096;  // in each half
  struct Hash {
    size_t operator()(const Key& key) const {
      return static_cast<size_t>(key.origin * 0x9E3779B97F4A7C15ull) ^ key.writer;
    }
  };
  using Texts = std::unordered_map<Key, ForeignText, Hash>;
  Texts recent_, older_;
};

}  // namespace agentspec
