// Memory in blocks of 32 KiB, cut from regions of 2 MiB for which the system is asked for huge pages: what a look-up
// reads lies scattered, and with small pages each read would miss the TLB as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace agentspec {

class BlockPool {
 public:
  static constexpr size_t kBlockBytes = size_t{1} << 15;

  // The one of the process; it outlives every engine.
  static BlockPool& Shared();

  // Aligned to its size; what it holds is undefined. Throws std::bad_alloc.
  void* Take();
  void Return(void* block);
  size_t UsedBytes() const;

 private:
  static constexpr size_t kRegionBytes = size_t{1} << 21;
  static constexpr size_t kBlocksPerRegion = kRegionBytes / kBlockBytes;  // bits of a mask
  static_assert(kBlocksPerRegion == 64);

  static void* MapRegion();

  mutable std::mutex mutex_;
  size_t num_used_ = 0;
  std::map<uintptr_t, uint64_t> free_blocks_;  // by region that has some: a bit for each
};

}  // namespace agentspec
