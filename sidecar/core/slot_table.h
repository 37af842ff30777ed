// An open-addressed table from tags to values that grows by small steps: a full segment is split in two, so that no
// insertion ever waits for the whole table.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "line_store.h"

namespace agentspec {

class SlotTable {
 public:
  SlotTable() = default;
  ~SlotTable();
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;

  void Prefetch(uint32_t tag) const {
    if (!directory_.empty()) __builtin_prefetch(HomeLine(tag));
  }
  // The value of a tag; 0: there is none.
  uint32_t Find(uint32_t tag) const;
  // The value of a tag; 0 where it is new, and then the caller must set it.
  uint32_t& Get(uint32_t tag);
  // Room for about so many tags, without growing.
  void Reserve(size_t num_tags);
  bool is_full() const { return depth_ == kMaxDepth; }

  size_t size() const { return size_; }
  size_t MemoryBytes() const;
  // Calls `visit` with each value. Throws std::runtime_error: an invariant is broken.
  void CheckIntegrity(const std::function<void(uint32_t value)>& visit) const;

 private:
  static constexpr int kSlotsPerLine = 8;
  static constexpr int kMaxDepth = 16;  // the other 16 bits of a tag choose the line
  struct alignas(64) Line {
    uint32_t tags[kSlotsPerLine];
    uint32_t values[kSlotsPerLine];  // 0: empty; the used ones come first
  };
  struct Entry {
    Line* lines;
    uint32_t segment;
  };
  struct Segment {
    uint32_t num_tags;
    int depth;  // leading bits that its tags have in common
  };

  // Bit i: slot i has the tag (an empty one may, too).
  static uint32_t Matches(const Line& line, uint32_t tag);
  size_t DirectoryIndex(uint32_t tag) const { return static_cast<size_t>(uint64_t{tag} << depth_ >> 32); }
  uint32_t LineIndex(uint32_t tag) const { return (tag & 0xFFFF) * num_lines_ >> 16; }
  uint32_t NextLine(uint32_t line) const { return line + 1 == num_lines_ ? 0 : line + 1; }
  const Line* HomeLine(uint32_t tag) const { return &directory_[DirectoryIndex(tag)].lines[LineIndex(tag)]; }
  static uint32_t MaxTags(uint32_t num_lines) { return num_lines * kSlotsPerLine * 7 / 8; }
  Line* NewLines(uint32_t num_lines) const;
  uint32_t& AddTo(Line* lines, uint32_t tag);  // a tag that is not there
  void MakeRoom(uint32_t tag);
  void Resize(uint32_t num_lines);
  void Split(size_t index);
  template <typename Visit>
  void ForEach(const Line* lines, Visit visit) const;

  std::vector<Entry> directory_;  // by the tag's first depth_ bits
  std::vector<Segment> segments_;
  int depth_ = 0;
  uint32_t num_lines_ = 0;  // of each segment; LineStore::kBlockLines if there are several
  size_t size_ = 0;
};

inline uint32_t SlotTable::Matches(const Line& line, uint32_t tag) {
#if defined(__SSE2__)
  __m128i wanted = _mm_set1_epi32(static_cast<int>(tag));
  auto equal = [&](int half) {
    return _mm_cmpeq_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(line.tags) + half), wanted);
  };
  __m128i words = _mm_packs_epi32(equal(0), equal(1));
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(words, _mm_setzero_si128())));
#else
  uint32_t matches = 0;
  for (int slot = 0; slot < kSlotsPerLine; ++slot) matches |= uint32_t{line.tags[slot] == tag} << slot;
  return matches;
#endif
}

inline uint32_t SlotTable::Find(uint32_t tag) const {
  if (directory_.empty()) return 0;
  const Line* lines = directory_[DirectoryIndex(tag)].lines;
  for (uint32_t index = LineIndex(tag);; index = NextLine(index)) {
    const Line& line = lines[index];
    if (uint32_t matches = Matches(line, tag)) return line.values[std::countr_zero(matches)];
    if (line.values[kSlotsPerLine - 1] == 0) return 0;
  }
}

inline uint32_t& SlotTable::Get(uint32_t tag) {
  if (directory_.empty()) Resize(1);
  Line* lines = directory_[DirectoryIndex(tag)].lines;
  for (uint32_t index = LineIndex(tag);; index = NextLine(index)) {
    Line& line = lines[index];
    uint32_t matches = Matches(line, tag);
    if (matches != 0 && line.values[std::countr_zero(matches)] != 0) return line.values[std::countr_zero(matches)];
    if (line.values[kSlotsPerLine - 1] == 0) break;
  }
  MakeRoom(tag);
  Entry& entry = directory_[DirectoryIndex(tag)];
  ++segments_[entry.segment].num_tags;
  ++size_;
  return AddTo(entry.lines, tag);
}

template <typename Visit>
void SlotTable::ForEach(const Line* lines, Visit visit) const {
  for (uint32_t index = 0; index < num_lines_; ++index)
    for (int slot = 0; slot < kSlotsPerLine && lines[index].values[slot] != 0; ++slot)
      visit(lines[index].tags[slot], lines[index].values[slot]);
}

}  // namespace agentspec
