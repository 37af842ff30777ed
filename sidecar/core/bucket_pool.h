// Buckets of 3, 7 or 15 positions: 16, 32 or 64 bytes that never cross a cache line. Word 0 counts, also what a full
// bucket of the largest size has forgotten: that one is a ring of the latest.
#pragma once

#include <array>
#include <cstdint>

#include "line_store.h"

namespace agentspec {

class BucketPool {
 public:
  static constexpr int kNumSizes = 3;
  static constexpr uint32_t kMaxBuckets = 1u << 28;  // numbers fit 28 bits; in units of 16 bytes
  static constexpr uint32_t Capacity(int size) { return (4u << size) - 1; }

  // The number of a new bucket; others may move.
  uint32_t Add(int size);
  void Free(uint32_t bucket, int size);
  uint32_t* operator[](uint32_t bucket) { return static_cast<uint32_t*>(lines_[bucket / 4]) + bucket % 4 * 4; }
  const uint32_t* operator[](uint32_t bucket) const {
    return static_cast<const uint32_t*>(lines_[bucket / 4]) + bucket % 4 * 4;
  }
  void Reserve(uint32_t num_lines) { lines_.Reserve(num_lines); }
  bool is_full() const { return lines_.size() >= kMaxBuckets / 4 - 16; }
  size_t MemoryBytes() const { return lines_.MemoryBytes(); }

 private:
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  LineStore lines_;
  std::array<uint32_t, kNumSizes> free_ = {kNone, kNone, kNone};  // by size, linked by word 0
};

}  // namespace agentspec
