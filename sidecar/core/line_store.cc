#include "line_store.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace agentspec {

CacheLine* AllocateLines(uint32_t num_lines) {
  if (num_lines == LineStore::kBlockLines) return static_cast<CacheLine*>(BlockPool::Shared().Take());
  return static_cast<CacheLine*>(::operator new(num_lines * sizeof(CacheLine), std::align_val_t{sizeof(CacheLine)}));
}

void FreeLines(CacheLine* lines, uint32_t num_lines) {
  if (num_lines == LineStore::kBlockLines)
    BlockPool::Shared().Return(lines);
  else
    ::operator delete(lines, std::align_val_t{sizeof(CacheLine)});
}

uint32_t LargerSize(uint32_t num_lines) {
  return std::min(std::max(num_lines + num_lines / 4, num_lines + 1), LineStore::kBlockLines);
}

LineStore::~LineStore() {
  for (CacheLine* block : blocks_) FreeLines(block, std::min(capacity_, kBlockLines));
}

uint32_t LineStore::Add() {
  if (size_ == capacity_) Grow(LargerSize(size_));
  return size_++;
}

void LineStore::Reserve(uint32_t num_lines) {
  if (num_lines > capacity_) Grow(std::min(num_lines, kBlockLines));
}

void LineStore::Grow(uint32_t num_lines) {
  if (capacity_ >= kBlockLines) {
    blocks_.push_back(AllocateLines(kBlockLines));
    capacity_ += kBlockLines;
    return;
  }
  CacheLine* larger = AllocateLines(num_lines);
  if (blocks_.empty()) {
    blocks_.push_back(larger);
  } else {
    std::memcpy(larger, blocks_[0], size_ * sizeof(CacheLine));
    FreeLines(blocks_[0], capacity_);
    blocks_[0] = larger;
  }
  capacity_ = num_lines;
}

}  // namespace agentspec
