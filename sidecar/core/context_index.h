// The burst context index: a token log, and for each token the contexts of 1, 2, 4 ... 32 tokens that preceded it.
//
// A context holds one position or a bucket of at most 15. A full bucket bursts: its positions are filed again under the
// next longer context, and the bucket stays as a ring of the 15 latest. A look-up goes from short to long contexts as
// long as buckets have burst, so it ends at the longest context that the log can tell apart, after at most six probes,
// and a position is stored about once. Structure and constants are ours; measured against suffix trees in D-008.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "types.h"

namespace agentspec {

inline constexpr int kNumOrders = 6;
inline constexpr std::array<int, kNumOrders> kOrders = {1, 2, 4, 8, 16, 32};
inline constexpr int kMaxContext = 32;

// Hashes of the contexts that end at one place of a text, shortest first.
struct ContextHashes {
  std::array<uint64_t, kNumOrders> hash;
  int num_orders = 0;
  bool is_whole = false;  // the last one reaches back to the start of the text (or block): no longer one exists
};

// A growing text with a hash of each of its prefixes, so that any context is hashed in constant time.
class HashedText {
 public:
  void Push(Token token);
  // Contexts of the place after the first `end` tokens. A context never reaches back past a kBlockStart at the start of
  // the text, nor past any kBlockStart when `is_strict`.
  ContextHashes Context(size_t end, bool is_strict) const;
  // The same of a short text that is not kept.
  static ContextHashes ContextOf(const Token* text, size_t length, bool from_start, bool is_strict, int max_orders);

  const Token* data() const { return tokens_.data(); }
  size_t size() const { return tokens_.size(); }
  Token operator[](size_t i) const { return tokens_[i]; }
  Token back() const { return tokens_.back(); }

 private:
  std::vector<Token> tokens_;
  std::vector<uint64_t> prefix_hash_{0};  // of the first i tokens
};

class ContextIndex {
 public:
  static constexpr int kPageTokens = 16;  // one cache line
  static constexpr int kBucketPositions = 15;
  static constexpr uint32_t kNoPage = 0xFFFFFFFF;
  static constexpr uint32_t kMaxPages = 1u << 26;  // positions fit 30 bits

  // Tokens of one writer and one block path; a text is a chain of pages.
  struct PageHeader {
    uint32_t next;
    uint32_t previous;
    uint32_t writer;    // request that wrote it
    uint16_t workflow;  // hash of its workflow id
    Label label;
    uint8_t fill;  // tokens in it
    bool starts_block;
  };

  explicit ContextIndex(bool is_strict) : is_strict_(is_strict) {}

  // Appends `token`, preceded by the contexts `hashes`, to the chain that ends in `page` (kNoPage starts one). A token
  // of a prompt's tail is kept as context only.
  // `starts_block`: the first token of a block in a text without kBlockStart.
  // Returns the page that the chain ends in now; kNoPage when the index is full, and nothing was appended.
  uint32_t Append(uint32_t page, Token token, const ContextHashes& hashes, Label label, uint32_t writer,
                  uint16_t workflow, bool starts_block = false);

  // Look-up in three rounds of memory reads, so that a caller overlaps those of many requests: prefetch the slots of
  // all contexts; find the bucket and prefetch it; prefetch the text at its positions.
  struct Lookup {
    uint32_t value = 0;          // slot value of the longest context found
    uint32_t shorter_value = 0;  // that of the next shorter one
  };
  void PrefetchSlots(const ContextHashes& hashes) const;
  void PrefetchBuckets(const ContextHashes& hashes) const { Find(hashes); }
  Lookup Find(const ContextHashes& hashes) const;
  void PrefetchText(const Lookup& lookup) const;
  // Writes the positions of a slot value, latest first, at most kBucketPositions; returns their number.
  int Positions(uint32_t value, Position* positions) const;

  const Token* PageText(uint32_t page) const { return &chunks_[page >> kChunkBits][page & kChunkMask].tokens[0]; }
  const PageHeader& Header(uint32_t page) const { return headers_[page >> kChunkBits][page & kChunkMask]; }
  // How many tokens before `position` equal the end of `text`, at most min(length, kMaxContext).
  int MatchLength(Position position, const Token* text, size_t length) const;

  uint32_t num_pages() const { return num_pages_; }
  size_t num_tokens() const { return num_tokens_; }  // that can be drafted
  bool is_empty() const { return num_pages_ == 0; }
  size_t MemoryBytes() const;
  // Throws std::runtime_error: an invariant is broken.
  void CheckIntegrity() const;

 private:
  static constexpr int kChunkBits = 6;  // 64 pages: growing never copies text
  static constexpr uint32_t kChunkMask = (1u << kChunkBits) - 1;
  static constexpr uint32_t kIsBucket = 0x80000000u;
  static constexpr uint32_t kHasBurst = 0x40000000u;

  struct alignas(64) Page {
    Token tokens[kPageTokens];
  };
  struct Slot {
    uint32_t tag;
    uint32_t value;  // 0: empty; position + 1; or kIsBucket | kHasBurst? | class << 28 | offset in 16-byte units
  };

  uint32_t NewPage(uint32_t previous, Label label, uint32_t writer, uint16_t workflow, bool starts_block);
  void File(Position position, int order, const ContextHashes& hashes);
  void AddToBucket(Slot* slot, Position position, int order, const ContextHashes& hashes, bool* goes_deeper);
  ContextHashes HashBefore(Position position, int max_orders) const;
  const Slot* FindSlot(uint64_t hash) const;
  Slot* GetSlot(uint64_t hash);
  size_t SlotIndex(uint32_t tag) const { return (tag * 0x9E3779B1u) >> shift_; }
  void GrowTable();
  uint32_t NewBucket(int size_class);
  void FreeBucket(uint32_t bucket, int size_class);
  uint32_t* Bucket(uint32_t value) { return &buckets_[size_t{value & 0x0FFFFFFFu} * 4]; }
  const uint32_t* Bucket(uint32_t value) const { return &buckets_[size_t{value & 0x0FFFFFFFu} * 4]; }

  bool is_strict_;
  std::vector<std::unique_ptr<Page[]>> chunks_;
  std::vector<std::unique_ptr<PageHeader[]>> headers_;
  uint32_t num_pages_ = 0;
  size_t num_tokens_ = 0;
  std::vector<Slot> table_;  // open addressing, a power of two, at most 80 % full
  size_t num_slots_ = 0;
  int shift_ = 32;
  std::vector<uint32_t> buckets_;           // units of 16 bytes; word 0 of a bucket counts, the rest are position + 1
  std::array<uint32_t, 3> free_buckets_{};  // per size class (4, 8, 16 words), linked by word 0; 0 ends the list
};

}  // namespace agentspec
