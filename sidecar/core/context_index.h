// The burst context index: a token log, and for each token the contexts of 1, 2, 4 ... 32 tokens that preceded it.
//
// A context holds one position or a bucket of at most 15. A full bucket bursts: its positions are filed again under the
// next longer context, and the bucket stays as a ring of the 15 latest. A look-up goes from short to long contexts as
// long as buckets have burst, so it ends at the longest context that the log can tell apart, after at most six probes,
// and a position is stored about once. Structure and constants are ours; measured against suffix trees in D-008.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "bucket_pool.h"
#include "context_hash.h"
#include "line_store.h"
#include "slot_table.h"
#include "types.h"

namespace agentspec {

// Who wrote a text.
struct TextSource {
  uint32_t writer;    // number of the request
  uint16_t workflow;  // hash of its workflow id
};

// A token to be filed under the contexts before it.
struct FiledToken {
  Token token;
  Label label;                // block path
  bool starts_block = false;  // the first one of a block in a text without kBlockStart
  ContextTags contexts;
};

class ContextIndex {
 public:
  static constexpr int kPageTokens = 16;
  static constexpr int kBucketPositions = 15;
  static constexpr uint32_t kMaxPages = (1u << 26) - 1;  // positions fit 30 bits
  static constexpr uint32_t kNoPage = kMaxPages;

  // Tokens of one writer and one block path, one cache line; a text is a chain of pages.
  struct alignas(64) Page {
    uint64_t next : 26, previous : 26;
    uint64_t fill : 5;  // tokens in it
    uint64_t starts_block : 1;
    uint32_t writer;
    uint16_t workflow;
    Label label;
    uint8_t text[kPageTokens * kTokenBytes];

    const uint8_t* begin() const { return reinterpret_cast<const uint8_t*>(this) + (sizeof(Page) - sizeof(text)); }
    Token operator[](uint32_t offset) const { return LoadToken(begin() + (offset + 1) * kTokenBytes); }
  };
  static_assert(sizeof(Page) == 64);

  explicit ContextIndex(bool is_strict) : is_strict_(is_strict) {}

  // Appends `tokens` to the chain that ends in `page` (kNoPage starts one), and sets `page` to its new end. Those of a
  // prompt's tail are kept as context only. Returns how many were appended: fewer when the index is full.
  size_t Append(std::span<const FiledToken> tokens, TextSource source, uint32_t& page);
  // Room for about so many tokens, without growing.
  void Reserve(size_t num_tokens);

  // Look-up in three rounds of memory reads, so that a caller overlaps those of many requests: prefetch the slots of
  // all contexts; find the bucket and prefetch it; prefetch the text at its positions.
  struct Lookup {
    uint32_t value = 0;          // slot value of the longest context found
    uint32_t shorter_value = 0;  // that of the next shorter one
  };
  void PrefetchSlots(const ContextTags& contexts) const {
    for (int level = 0; level < contexts.num_orders; ++level) slots_.Prefetch(contexts.tag[level]);
  }
  Lookup Find(const ContextTags& contexts) const;
  void PrefetchText(const Lookup& lookup) const;
  // What appending to the chain that ends in `page` writes first.
  void PrefetchPage(uint32_t page) const {
    if (page != kNoPage) __builtin_prefetch(pages_[page], 1);
  }
  // Writes the positions of a slot value, latest first, at most kBucketPositions; returns their number.
  int Positions(uint32_t value, Position* positions) const;

  const Page& page(uint32_t index) const { return *static_cast<const Page*>(pages_[index]); }
  // How many tokens before `position` equal the end of `text`, at most kMaxContext.
  int MatchLength(Position position, const TextWindow& text) const;

  uint32_t num_pages() const { return pages_.size(); }
  size_t num_tokens() const { return num_tokens_; }  // that can be drafted
  bool is_empty() const { return num_pages() == 0; }
  size_t MemoryBytes() const {
    return sizeof(*this) - sizeof(pages_) + pages_.MemoryBytes() + slots_.MemoryBytes() + buckets_.MemoryBytes();
  }
  // Throws std::runtime_error: an invariant is broken.
  void CheckIntegrity() const;

 private:
  static constexpr uint32_t kIsBucket = 0x80000000u;
  static constexpr uint32_t kHasBurst = 0x40000000u;
  static constexpr uint32_t kBucketBits = 0x0FFFFFFFu;
  // Values of slots. 0: empty; position + 1; or kIsBucket | kHasBurst? | size << 28 | bucket.
  static int BucketSize(uint32_t value) { return static_cast<int>(value >> 28 & 3); }

  Page& MutablePage(uint32_t index) { return *static_cast<Page*>(pages_[index]); }
  uint32_t NewPage(uint32_t previous, const FiledToken& first, TextSource source);
  // `tag_of(level, tag)`: whether the position has a context of that order; sets its tag.
  template <typename TagOf>
  void File(Position position, int level, TagOf tag_of);
  // Returns whether the bucket has burst, so that the position belongs under the next longer context, too.
  bool AddToBucket(uint32_t& value, Position position, int level, bool has_longer);
  // The context of one order before a position; false if there is none.
  bool TagBefore(Position position, int level, uint32_t& tag) const;

  bool is_strict_;
  LineStore pages_;
  SlotTable slots_;
  BucketPool buckets_;
  size_t num_tokens_ = 0;
};

}  // namespace agentspec
