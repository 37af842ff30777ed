#include "context_index.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace agentspec {

namespace {

constexpr size_t kAhead = 8;              // tokens whose memory reads overlap when many are appended
constexpr size_t kCachedSlots = 1 << 16;  // of a table that the processor's cache holds: nothing to overlap

// How many bytes before `a` and `b` are equal, at most `limit`. 8 bytes before the first of them must be readable.
int CommonSuffix(const uint8_t* a, const uint8_t* b, int limit) {
  for (int length = 0; length < limit; length += 8) {
    uint64_t word_a, word_b;
    std::memcpy(&word_a, a - length - 8, 8);
    std::memcpy(&word_b, b - length - 8, 8);
    if (word_a != word_b) return std::min(limit, length + std::countl_zero(word_a ^ word_b) / 8);
  }
  return limit;
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "tokens are kept little endian");

size_t ContextIndex::Append(std::span<const FiledToken> tokens, TextSource source, uint32_t& page) {
  bool is_large = slots_.size() > kCachedSlots && tokens.size() > kAhead;
  if (is_large) {
    for (const FiledToken& filed : tokens.first(std::min(tokens.size(), 2 * kAhead))) PrefetchSlots(filed.contexts);
    for (const FiledToken& filed : tokens.first(kAhead)) Find(filed.contexts);
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (is_large && i + 2 * kAhead < tokens.size()) PrefetchSlots(tokens[i + 2 * kAhead].contexts);
    if (is_large && i + kAhead < tokens.size()) Find(tokens[i + kAhead].contexts);
    const FiledToken& filed = tokens[i];
    if (page == kNoPage || filed.starts_block || this->page(page).fill == kPageTokens ||
        this->page(page).label != filed.label) {
      if (num_pages() == kMaxPages || slots_.is_full() || buckets_.is_full()) return i;
      page = NewPage(page, filed, source);
    }
    Page& target = MutablePage(page);
    Position position = page * kPageTokens + target.fill;
    StoreToken(target.text + target.fill * kTokenBytes, filed.token);
    ++target.fill;
    if (filed.token == kBlockStart || filed.label == kPromptTailLabel) continue;
    ++num_tokens_;
    const ContextTags& contexts = filed.contexts;
    File(position, 0, [&](int level, uint32_t& tag) {
      tag = contexts.tag[level];
      return level < contexts.num_orders;
    });
  }
  return tokens.size();
}

void ContextIndex::Reserve(size_t num_tokens) {
  pages_.Reserve(static_cast<uint32_t>(num_tokens / kPageTokens + 2));
  slots_.Reserve(num_tokens * 3 / 4);
}

uint32_t ContextIndex::NewPage(uint32_t previous, const FiledToken& first, TextSource source) {
  uint32_t index = pages_.Add();
  Page& page = MutablePage(index);
  page.next = kNoPage;
  page.previous = previous;
  page.fill = 0;
  page.starts_block = first.starts_block;
  page.writer = source.writer;
  page.workflow = source.workflow;
  page.label = first.label;
  if (previous != kNoPage) MutablePage(previous).next = index;
  return index;
}

template <typename TagOf>
void ContextIndex::File(Position position, int level, TagOf tag_of) {
  uint32_t tag;
  for (bool exists = tag_of(level, tag); exists; ++level) {
    uint32_t& value = slots_.Get(tag);
    if (value == 0) {
      value = position + 1;
      return;
    }
    if (!(value & kIsBucket)) {
      uint32_t bucket = buckets_.Add(0);
      uint32_t* words = buckets_[bucket];
      words[0] = 2;
      words[1] = value;
      words[2] = position + 1;
      value = kIsBucket | bucket;
      return;
    }
    exists = level + 1 < kNumOrders && tag_of(level + 1, tag);
    if (!AddToBucket(value, position, level, exists)) return;
  }
}

bool ContextIndex::AddToBucket(uint32_t& value, Position position, int level, bool has_longer) {
  int size = BucketSize(value);
  uint32_t capacity = BucketPool::Capacity(size);
  uint32_t* words = buckets_[value & kBucketBits];
  uint32_t count = words[0];
  if (count < capacity) {
    words[1 + count] = position + 1;
    words[0] = count + 1;
    return false;
  }
  if (size + 1 < BucketPool::kNumSizes) {
    uint32_t larger = buckets_.Add(size + 1);
    words = buckets_[value & kBucketBits];  // it may have moved
    uint32_t* copy = buckets_[larger];
    std::memcpy(copy, words, sizeof(uint32_t) * (capacity + 1));
    copy[1 + count] = position + 1;
    copy[0] = count + 1;
    buckets_.Free(value & kBucketBits, size);
    value = kIsBucket | static_cast<uint32_t>(size + 1) << 28 | larger;
    return false;
  }
  std::array<uint32_t, kBucketPositions> filed;
  bool bursts_now = has_longer && !(value & kHasBurst);
  if (bursts_now) {
    std::copy_n(words + 1, kBucketPositions, filed.begin());
    value |= kHasBurst;
  }
  words[1 + count % kBucketPositions] = position + 1;
  words[0] = count + 1;
  if (bursts_now) {
    for (uint32_t earlier : filed) __builtin_prefetch(pages_[(earlier - 1) / kPageTokens]);
    for (uint32_t earlier : filed)
      File(earlier - 1, level + 1,
           [&](int longer, uint32_t& tag) { return longer < kNumOrders && TagBefore(earlier - 1, longer, tag); });
  }
  return has_longer;
}

bool ContextIndex::TagBefore(Position position, int level, uint32_t& tag) const {
  uint32_t index = position / kPageTokens;
  uint32_t offset = position % kPageTokens;
  const Page* source = &page(index);
  uint64_t hash = 0;
  Token token = 0;
  for (int length = 0;; ++length) {
    bool is_start = offset == 0 && source->previous == kNoPage;
    bool is_whole = length > 0 && token == kBlockStart && (is_strict_ || is_start);
    if (is_whole || length == kOrders[level]) {
      // One whole within the next shorter order has no longer one.
      if (level > 0 && length <= kOrders[level - 1]) return false;
      tag = ContextTag(hash, level, is_whole);
      return true;
    }
    if (is_start) return false;
    if (offset == 0) {
      source = &page(source->previous);
      offset = source->fill;
    }
    token = (*source)[--offset];
    hash += SpreadToken(token) * kHashPowers[length];
  }
}

ContextIndex::Lookup ContextIndex::Find(const ContextTags& contexts) const {
  Lookup lookup;
  for (int level = 0; level < contexts.num_orders; ++level) {
    uint32_t value = slots_.Find(contexts.tag[level]);
    if (value == 0) break;
    lookup.shorter_value = lookup.value;
    lookup.value = value;
    if ((value & (kIsBucket | kHasBurst)) != (kIsBucket | kHasBurst)) break;
  }
  for (uint32_t value : {lookup.value, lookup.shorter_value})
    if (value & kIsBucket) __builtin_prefetch(buckets_[value & kBucketBits]);
  return lookup;
}

void ContextIndex::PrefetchText(const Lookup& lookup) const {
  std::array<Position, kBucketPositions> positions;
  int num_positions = Positions(lookup.value, positions.data());
  for (int i = 0; i < num_positions; ++i) __builtin_prefetch(pages_[positions[i] / kPageTokens]);
}

int ContextIndex::Positions(uint32_t value, Position* positions) const {
  if (value == 0) return 0;
  if (!(value & kIsBucket)) {
    positions[0] = value - 1;
    return 1;
  }
  const uint32_t* words = buckets_[value & kBucketBits];
  uint32_t count = words[0];
  int num_positions = static_cast<int>(std::min<uint32_t>(count, kBucketPositions));
  uint32_t place = (count - 1) % kBucketPositions;  // of the latest
  for (int i = 0; i < num_positions; ++i) {
    positions[i] = words[1 + place] - 1;
    place = place == 0 ? kBucketPositions - 1 : place - 1;
  }
  return num_positions;
}

int ContextIndex::MatchLength(Position position, const TextWindow& text) const {
  const Page* source = &page(position / kPageTokens);
  int offset = static_cast<int>(position % kPageTokens);
  const uint8_t* end = text.end();
  for (int matched = 0;;) {
    int limit = std::min(offset, text.length() - matched);
    int equal = CommonSuffix(source->begin() + offset * kTokenBytes, end - matched * kTokenBytes,
                             limit * static_cast<int>(kTokenBytes)) /
                static_cast<int>(kTokenBytes);
    matched += equal;
    if (equal < offset || matched == text.length() || source->previous == kNoPage) return matched;
    source = &page(source->previous);
    offset = static_cast<int>(source->fill);
  }
}

void ContextIndex::CheckIntegrity() const {
  auto fail = [](const std::string& what) { throw std::runtime_error("context index: " + what); };
  size_t num_tokens = 0;
  for (uint32_t index = 0; index < num_pages(); ++index) {
    const Page& source = page(index);
    if (source.fill == 0 || source.fill > kPageTokens) fail("page " + std::to_string(index) + " has a wrong fill");
    if (source.next != kNoPage && (source.next >= num_pages() || page(source.next).previous != index))
      fail("page " + std::to_string(index) + " has a broken link");
    if (source.label == kPromptTailLabel) continue;
    for (uint32_t offset = 0; offset < source.fill; ++offset) num_tokens += source[offset] != kBlockStart;
  }
  if (num_tokens != num_tokens_) fail("pages hold " + std::to_string(num_tokens) + " tokens, not num_tokens");
  slots_.CheckIntegrity([&](uint32_t value) {
    std::array<Position, kBucketPositions> positions;
    for (int i = 0, n = Positions(value, positions.data()); i < n; ++i) {
      uint32_t index = positions[i] / kPageTokens;
      if (index >= num_pages() || positions[i] % kPageTokens >= page(index).fill) fail("a position is outside the log");
    }
  });
}

}  // namespace agentspec
