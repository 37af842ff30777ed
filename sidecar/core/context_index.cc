#include "context_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace agentspec {

namespace {

constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kWholeContext = 0x5151;

// Spreads the few bits of a token id, so that the sums below do not cancel out.
inline uint64_t Spread(Token token) {
  uint64_t value = (static_cast<uint32_t>(token) + 1) * 0xD6E8FEB86659FD93ull;
  return value ^ (value >> 32);
}

inline uint64_t Finish(uint64_t hash, uint64_t kind) {
  hash = (hash ^ kind) * kMultiplier;
  return hash ^ (hash >> 29);
}

// kMultiplier to the power of each order.
constexpr auto kPowers = [] {
  std::array<uint64_t, kNumOrders> powers{};
  uint64_t power = 1;
  for (int order = 0, exponent = 0; order < kNumOrders; ++order) {
    for (; exponent < kOrders[order]; ++exponent) power *= kMultiplier;
    powers[order] = power;
  }
  return powers;
}();

inline uint32_t Tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

// Contexts of a text of `length` tokens, given the hash of its last `order` tokens for the orders that fit, and of all.
template <typename HashOfLast>
ContextHashes Collect(size_t length, bool from_start, int max_orders, HashOfLast hash_of_last) {
  ContextHashes result;
  for (int level = 0; level < max_orders && !result.is_whole; ++level) {
    auto order = static_cast<size_t>(kOrders[level]);
    result.is_whole = from_start && order >= length;
    if (order > length && !result.is_whole) break;
    uint64_t kind = result.is_whole ? kWholeContext : static_cast<uint64_t>(level);
    result.hash[result.num_orders++] = Finish(hash_of_last(level, std::min(order, length)), kind);
  }
  return result;
}

// How many of the last tokens form the text that contexts may see; sets whether it is all there is.
size_t VisibleLength(const Token* text, size_t length, bool is_strict, bool* from_start) {
  if (is_strict) {
    for (size_t i = 1; i <= std::min<size_t>(length, kMaxContext); ++i) {
      if (text[length - i] != kBlockStart) continue;
      *from_start = true;
      return i;
    }
  }
  *from_start = *from_start && length > 0 && text[0] == kBlockStart;
  return length;
}

}  // namespace

void HashedText::Push(Token token) {
  tokens_.push_back(token);
  prefix_hash_.push_back(prefix_hash_.back() * kMultiplier + Spread(token));
}

ContextHashes HashedText::Context(size_t end, bool is_strict) const {
  bool from_start = true;
  size_t length = VisibleLength(tokens_.data(), end, is_strict, &from_start);
  return Collect(length, from_start, kNumOrders, [&](int level, size_t order) {
    uint64_t power = kPowers[level];
    if (order != static_cast<size_t>(kOrders[level])) {
      power = 1;
      for (size_t i = 0; i < order; ++i) power *= kMultiplier;
    }
    return prefix_hash_[end] - prefix_hash_[end - order] * power;
  });
}

ContextHashes HashedText::ContextOf(const Token* text, size_t length, bool from_start, bool is_strict, int max_orders) {
  size_t visible = VisibleLength(text, length, is_strict, &from_start);
  return Collect(visible, from_start, max_orders, [&](int, size_t order) {
    uint64_t hash = 0;
    for (size_t i = length - order; i < length; ++i) hash = hash * kMultiplier + Spread(text[i]);
    return hash;
  });
}

uint32_t ContextIndex::Append(uint32_t page, Token token, const ContextHashes& hashes, Label label, uint32_t writer,
                              uint16_t workflow, bool starts_block) {
  if (page == kNoPage || starts_block || Header(page).fill == kPageTokens || Header(page).label != label) {
    if (num_pages_ == kMaxPages) return kNoPage;
    page = NewPage(page, label, writer, workflow, starts_block);
  }
  PageHeader& header = headers_[page >> kChunkBits][page & kChunkMask];
  Position position = page * kPageTokens + header.fill;
  chunks_[page >> kChunkBits][page & kChunkMask].tokens[header.fill++] = token;
  if (token != kBlockStart && label != kPromptTailLabel) {
    ++num_tokens_;
    File(position, 0, hashes);
  }
  return page;
}

uint32_t ContextIndex::NewPage(uint32_t previous, Label label, uint32_t writer, uint16_t workflow, bool starts_block) {
  uint32_t page = num_pages_++;
  if ((page & kChunkMask) == 0) {
    chunks_.emplace_back(new Page[kChunkMask + 1]);
    headers_.emplace_back(new PageHeader[kChunkMask + 1]);
  }
  headers_[page >> kChunkBits][page & kChunkMask] = {kNoPage, previous, writer, workflow, label, 0, starts_block};
  if (previous != kNoPage) headers_[previous >> kChunkBits][previous & kChunkMask].next = page;
  return page;
}

void ContextIndex::File(Position position, int order, const ContextHashes& hashes) {
  for (; order < hashes.num_orders; ++order) {
    Slot* slot = GetSlot(hashes.hash[order]);
    if (slot->value == 0) {
      slot->value = position + 1;
      return;
    }
    if (!(slot->value & kIsBucket)) {
      uint32_t bucket = NewBucket(0);
      uint32_t* words = Bucket(bucket);
      words[0] = 2;
      words[1] = slot->value;
      words[2] = position + 1;
      slot->value = kIsBucket | bucket;
      return;
    }
    bool goes_deeper = false;
    AddToBucket(slot, position, order, hashes, &goes_deeper);
    if (!goes_deeper) return;
  }
}

void ContextIndex::AddToBucket(Slot* slot, Position position, int order, const ContextHashes& hashes,
                               bool* goes_deeper) {
  uint32_t size_class = slot->value >> 28 & 3;
  uint32_t capacity = (4u << size_class) - 1;
  uint32_t* words = Bucket(slot->value);
  uint32_t count = words[0];
  bool has_burst = slot->value & kHasBurst;
  if (count < capacity) {
    words[1 + count] = position + 1;
    words[0] = count + 1;
    return;
  }
  if (size_class < 2) {
    uint32_t larger = NewBucket(static_cast<int>(size_class) + 1);
    words = Bucket(slot->value);  // the pool may have moved
    uint32_t* copy = Bucket(larger);
    std::memcpy(copy, words, sizeof(uint32_t) * (capacity + 1));
    copy[1 + count] = position + 1;
    copy[0] = count + 1;
    FreeBucket(slot->value & 0x0FFFFFFFu, static_cast<int>(size_class));
    slot->value = kIsBucket | (size_class + 1) << 28 | larger;
    return;
  }
  bool has_longer_context = order + 1 < kNumOrders && !(hashes.is_whole && order == hashes.num_orders - 1);
  std::array<uint32_t, kBucketPositions> filed;
  bool bursts_now = !has_burst && has_longer_context;
  if (bursts_now) {
    std::copy_n(words + 1, kBucketPositions, filed.begin());
    slot->value |= kHasBurst;
  }
  words[1 + count % kBucketPositions] = position + 1;
  words[0] = count + 1;
  if (bursts_now) {
    for (uint32_t earlier : filed) {
      ContextHashes longer = HashBefore(earlier - 1, order + 2);
      if (longer.num_orders > order + 1) File(earlier - 1, order + 1, longer);
    }
  }
  *goes_deeper = has_longer_context;
}

ContextHashes ContextIndex::HashBefore(Position position, int max_orders) const {
  std::array<Token, kMaxContext> text;
  size_t room = kMaxContext;
  uint32_t page = position / kPageTokens;
  uint32_t offset = position % kPageTokens;
  bool from_start = false;
  while (true) {
    if (offset == 0) {
      page = Header(page).previous;
      if (page == kNoPage) {
        from_start = true;
        break;
      }
      offset = Header(page).fill;
    }
    if (room == 0) break;
    text[--room] = PageText(page)[--offset];
  }
  return HashedText::ContextOf(text.data() + room, kMaxContext - room, from_start, is_strict_, max_orders);
}

const ContextIndex::Slot* ContextIndex::FindSlot(uint64_t hash) const {
  if (table_.empty()) return nullptr;
  size_t mask = table_.size() - 1;
  for (size_t index = SlotIndex(Tag(hash)); table_[index].value != 0; index = (index + 1) & mask)
    if (table_[index].tag == Tag(hash)) return &table_[index];
  return nullptr;
}

ContextIndex::Slot* ContextIndex::GetSlot(uint64_t hash) {
  if ((num_slots_ + 1) * 10 > table_.size() * 8) GrowTable();
  size_t mask = table_.size() - 1;
  size_t index = SlotIndex(Tag(hash));
  for (; table_[index].value != 0; index = (index + 1) & mask)
    if (table_[index].tag == Tag(hash)) return &table_[index];
  table_[index].tag = Tag(hash);
  ++num_slots_;  // every caller fills the slot
  return &table_[index];
}

void ContextIndex::GrowTable() {
  std::vector<Slot> old(table_.empty() ? 16 : table_.size() * 2, Slot{0, 0});
  old.swap(table_);
  shift_ = 32;
  for (size_t size = table_.size(); size > 1; size /= 2) --shift_;
  size_t mask = table_.size() - 1;
  for (const Slot& slot : old) {
    if (slot.value == 0) continue;
    size_t index = SlotIndex(slot.tag);
    while (table_[index].value != 0) index = (index + 1) & mask;
    table_[index] = slot;
  }
}

uint32_t ContextIndex::NewBucket(int size_class) {
  if (uint32_t bucket = free_buckets_[size_class]) {
    free_buckets_[size_class] = buckets_[size_t{bucket} * 4];
    return bucket;
  }
  if (buckets_.empty()) buckets_.resize(4);  // unit 0 stays unused: it ends the free lists
  size_t begin = buckets_.size();
  buckets_.resize(begin + (size_t{4} << size_class));
  return static_cast<uint32_t>(begin / 4);
}

void ContextIndex::FreeBucket(uint32_t bucket, int size_class) {
  buckets_[size_t{bucket} * 4] = free_buckets_[size_class];
  free_buckets_[size_class] = bucket;
}

void ContextIndex::PrefetchSlots(const ContextHashes& hashes) const {
  if (table_.empty()) return;
  for (int order = 0; order < hashes.num_orders; ++order)
    __builtin_prefetch(&table_[SlotIndex(Tag(hashes.hash[order]))]);
}

ContextIndex::Lookup ContextIndex::Find(const ContextHashes& hashes) const {
  Lookup lookup;
  for (int order = 0; order < hashes.num_orders; ++order) {
    const Slot* slot = FindSlot(hashes.hash[order]);
    if (slot == nullptr) break;
    lookup.shorter_value = lookup.value;
    lookup.value = slot->value;
    if (!(slot->value & kIsBucket) || !(slot->value & kHasBurst)) break;
  }
  for (uint32_t value : {lookup.value, lookup.shorter_value})
    if (value & kIsBucket) __builtin_prefetch(Bucket(value));
  return lookup;
}

void ContextIndex::PrefetchText(const Lookup& lookup) const {
  std::array<Position, kBucketPositions> positions;
  int num_positions = Positions(lookup.value, positions.data());
  for (int i = 0; i < num_positions; ++i) {
    uint32_t page = positions[i] / kPageTokens;
    __builtin_prefetch(PageText(page));
    __builtin_prefetch(&Header(page));
  }
}

int ContextIndex::Positions(uint32_t value, Position* positions) const {
  if (value == 0) return 0;
  if (!(value & kIsBucket)) {
    positions[0] = value - 1;
    return 1;
  }
  const uint32_t* words = Bucket(value);
  uint32_t count = words[0];
  int num_positions = static_cast<int>(std::min<uint32_t>(count, kBucketPositions));
  for (int i = 0; i < num_positions; ++i)
    positions[i] = words[1 + (count - 1 - static_cast<uint32_t>(i)) % kBucketPositions] - 1;
  return num_positions;
}

int ContextIndex::MatchLength(Position position, const Token* text, size_t length) const {
  int limit = static_cast<int>(std::min<size_t>(length, kMaxContext));
  uint32_t page = position / kPageTokens;
  uint32_t offset = position % kPageTokens;
  const Token* tokens = PageText(page);
  for (int matched = 0; matched < limit; ++matched) {
    if (offset == 0) {
      page = Header(page).previous;
      if (page == kNoPage) return matched;
      offset = Header(page).fill;
      tokens = PageText(page);
    }
    if (tokens[--offset] != text[length - 1 - static_cast<size_t>(matched)]) return matched;
  }
  return limit;
}

size_t ContextIndex::MemoryBytes() const {
  return sizeof(*this) + chunks_.size() * ((kChunkMask + 1) * (sizeof(Page) + sizeof(PageHeader))) +
         chunks_.capacity() * 2 * sizeof(void*) + table_.capacity() * sizeof(Slot) +
         buckets_.capacity() * sizeof(uint32_t);
}

void ContextIndex::CheckIntegrity() const {
  auto fail = [](const std::string& what) { throw std::runtime_error("context index: " + what); };
  size_t num_tokens = 0;
  for (uint32_t page = 0; page < num_pages_; ++page) {
    const PageHeader& header = Header(page);
    if (header.fill == 0 || header.fill > kPageTokens) fail("page " + std::to_string(page) + " has a wrong fill");
    if (header.next != kNoPage && (header.next >= num_pages_ || Header(header.next).previous != page))
      fail("page " + std::to_string(page) + " has a broken link");
    if (header.label == kPromptTailLabel) continue;
    num_tokens += header.fill - std::count(PageText(page), PageText(page) + header.fill, kBlockStart);
  }
  if (num_tokens != num_tokens_) fail("pages hold " + std::to_string(num_tokens) + " tokens, not num_tokens");
  size_t num_slots = 0;
  for (const Slot& slot : table_) {
    if (slot.value == 0) continue;
    ++num_slots;
    std::array<Position, kBucketPositions> positions;
    for (int i = 0, n = Positions(slot.value, positions.data()); i < n; ++i) {
      uint32_t page = positions[i] / kPageTokens;
      if (page >= num_pages_ || positions[i] % kPageTokens >= Header(page).fill) fail("a position is outside the log");
    }
  }
  if (num_slots != num_slots_ || num_slots_ * 10 > table_.size() * 8) fail("the table's count is wrong");
}

}  // namespace agentspec
