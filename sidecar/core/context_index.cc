#include "context_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace agentspec {

namespace {

constexpr uint64_t kSeed = 0x1234567ull;
constexpr uint64_t kWholeContext = 0x5151;
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ull;

inline uint64_t Mix(uint64_t hash, uint32_t value) {
  hash = (hash ^ value) * kMultiplier;
  return hash ^ (hash >> 29);
}

inline uint32_t Tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

}  // namespace

ContextHashes HashContext(const Token* text, size_t length, bool from_start, bool is_strict, int max_orders) {
  ContextHashes result;
  uint64_t hash = kSeed;
  size_t num_hashed = 0;
  while (result.num_orders < max_orders && !result.is_whole) {
    auto order = static_cast<size_t>(kOrders[result.num_orders]);
    while (num_hashed < order && num_hashed < length && !result.is_whole) {
      Token token = text[length - 1 - num_hashed++];
      hash = Mix(hash, static_cast<uint32_t>(token));
      result.is_whole = token == kBlockStart && (is_strict || (from_start && num_hashed == length));
    }
    if (num_hashed < order && !result.is_whole) break;
    result.hash[result.num_orders] = Mix(hash, result.is_whole ? kWholeContext : result.num_orders);
    ++result.num_orders;
  }
  return result;
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
  if (token != kBlockStart) {
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
  return HashContext(text.data() + room, kMaxContext - room, from_start, is_strict_, max_orders);
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
