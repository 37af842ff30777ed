#include "slot_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace agentspec {

SlotTable::~SlotTable() {
  for (size_t index = 0; index < directory_.size(); ++index) {
    const Entry& entry = directory_[index];
    if (index > 0 && directory_[index - 1].segment == entry.segment) continue;
    FreeLines(reinterpret_cast<CacheLine*>(entry.lines), num_lines_);
  }
}

SlotTable::Line* SlotTable::NewLines(uint32_t num_lines) const {
  CacheLine* lines = AllocateLines(num_lines);
  std::memset(lines, 0, num_lines * sizeof(CacheLine));
  return reinterpret_cast<Line*>(lines);
}

uint32_t& SlotTable::AddTo(Line* lines, uint32_t tag) {
  uint32_t index = LineIndex(tag);
  while (lines[index].values[kSlotsPerLine - 1] != 0) index = NextLine(index);
  Line& line = lines[index];
  int slot = 0;
  while (line.values[slot] != 0) ++slot;
  line.tags[slot] = tag;
  return line.values[slot];
}

void SlotTable::Reserve(size_t num_tags) {
  uint32_t num_lines = 1;
  while (num_lines < LineStore::kBlockLines && MaxTags(num_lines) < num_tags) num_lines = LargerSize(num_lines);
  if (num_lines > num_lines_) Resize(num_lines);
  while (MaxTags(num_lines_) * segments_.size() < num_tags && depth_ < kMaxDepth)
    for (size_t index = 0, size = directory_.size(); index < size; ++index) Split(2 * index);
}

void SlotTable::MakeRoom(uint32_t tag) {
  if (segments_[directory_[DirectoryIndex(tag)].segment].num_tags < MaxTags(num_lines_)) return;
  if (num_lines_ < LineStore::kBlockLines)
    Resize(LargerSize(num_lines_));
  else
    Split(DirectoryIndex(tag));
}

void SlotTable::Resize(uint32_t num_lines) {
  Line* lines = NewLines(num_lines);
  if (directory_.empty()) {
    directory_ = {{lines, 0}};
    segments_ = {{0, 0}};
    num_lines_ = num_lines;
    return;
  }
  Line* old = std::exchange(directory_[0].lines, lines);
  uint32_t old_num_lines = std::exchange(num_lines_, num_lines);
  for (uint32_t index = 0; index < old_num_lines; ++index)
    for (int slot = 0; slot < kSlotsPerLine && old[index].values[slot] != 0; ++slot)
      AddTo(lines, old[index].tags[slot]) = old[index].values[slot];
  FreeLines(reinterpret_cast<CacheLine*>(old), old_num_lines);
}

void SlotTable::Split(size_t index) {
  Segment& segment = segments_[directory_[index].segment];
  if (segment.depth == depth_) {
    std::vector<Entry> twice(directory_.size() * 2);
    for (size_t i = 0; i < twice.size(); ++i) twice[i] = directory_[i / 2];
    directory_ = std::move(twice);
    ++depth_;
    index *= 2;
  }
  ++segment.depth;
  size_t num_entries = size_t{1} << (depth_ - segment.depth);  // of each half
  size_t begin = index / (2 * num_entries) * (2 * num_entries);
  Line* old = directory_[begin].lines;
  std::array<Line*, 2> halves = {NewLines(num_lines_), NewLines(num_lines_)};
  std::array<uint32_t, 2> num_tags{};
  ForEach(old, [&](uint32_t tag, uint32_t value) {
    uint32_t half = tag >> (32 - segment.depth) & 1;
    AddTo(halves[half], tag) = value;
    ++num_tags[half];
  });
  FreeLines(reinterpret_cast<CacheLine*>(old), num_lines_);
  segment.num_tags = num_tags[0];
  Segment second{num_tags[1], segment.depth};
  for (size_t i = 0; i < num_entries; ++i) {
    directory_[begin + i].lines = halves[0];
    directory_[begin + num_entries + i] = {halves[1], static_cast<uint32_t>(segments_.size())};
  }
  segments_.push_back(second);
}

size_t SlotTable::MemoryBytes() const {
  size_t bytes = segments_.size() * num_lines_ * sizeof(Line);
  return bytes + directory_.capacity() * sizeof(Entry) + segments_.capacity() * sizeof(Segment);
}

void SlotTable::CheckIntegrity(const std::function<void(uint32_t value)>& visit) const {
  size_t num_tags = 0;
  std::vector<uint32_t> by_segment(segments_.size());
  for (size_t index = 0; index < directory_.size(); ++index) {
    const Entry& entry = directory_[index];
    if (index > 0 && directory_[index - 1].segment == entry.segment) continue;
    ForEach(entry.lines, [&](uint32_t tag, uint32_t value) {
      if (Find(tag) != value) throw std::runtime_error("slot table: a tag is not where it is looked up");
      ++by_segment[entry.segment];
      ++num_tags;
      visit(value);
    });
  }
  for (size_t segment = 0; segment < segments_.size(); ++segment)
    if (segments_[segment].num_tags != by_segment[segment] || by_segment[segment] > MaxTags(num_lines_))
      throw std::runtime_error("slot table: the count of segment " + std::to_string(segment) + " is wrong");
  if (num_tags != size_) throw std::runtime_error("slot table: its count is wrong");
}

}  // namespace agentspec
