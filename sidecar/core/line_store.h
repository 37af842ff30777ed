// A growing array of cache lines. One block that grows while it is small, then more blocks: growing a large one moves
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "block_pool.h"

namespace agentspec {

struct alignas(64) CacheLine {
  uint8_t bytes[64];
};

class LineStore {
 public:
  static constexpr uint32_t kBlockLines = BlockPool::kBlockBytes / sizeof(CacheLine);

  LineStore() = default;
  ~LineStore();
  LineStore(const LineStore&) = delete;
  LineStore& operator=(const LineStore&) = delete;

  // The index of one more line; what it holds is undefined. Lines may move.
  uint32_t Add();
  // Room for `num_lines` in all.
  void Reserve(uint32_t num_lines);
  void* operator[](uint32_t line) { return &blocks_[line / kBlockLines][line % kBlockLines]; }
  const void* operator[](uint32_t line) const { return &blocks_[line / kBlockLines][line % kBlockLines]; }
  uint32_t size() const { return size_; }
  size_t MemoryBytes() const {
    return capacity_ * sizeof(CacheLine) + (blocks_.capacity() > 1 ? blocks_.capacity() * sizeof(void*) : 0);
  }

 private:
  void Grow(uint32_t num_lines);

  std::vector<CacheLine*> blocks_;
  uint32_t size_ = 0;
  uint32_t capacity_ = 0;
};

// `num_lines` cache lines; of the pool when they fill a block of it.
CacheLine* AllocateLines(uint32_t num_lines);
void FreeLines(CacheLine* lines, uint32_t num_lines);
// A size for an array of `num_lines` that has become too small.
uint32_t LargerSize(uint32_t num_lines);

}  // namespace agentspec
