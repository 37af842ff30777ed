#include "block_pool.h"

#include <sys/mman.h>

#include <bit>
#include <new>

namespace agentspec {

BlockPool& BlockPool::Shared() {
  static auto* pool = new BlockPool;  // never destroyed: engines may end after static objects do
  return *pool;
}

void* BlockPool::Take() {
  std::lock_guard lock(mutex_);
  if (free_blocks_.empty()) free_blocks_.emplace(reinterpret_cast<uintptr_t>(MapRegion()), ~uint64_t{0});
  auto region = free_blocks_.begin();  // the lowest address: the others may become free as a whole
  auto block = static_cast<size_t>(std::countr_zero(region->second));
  void* begin = reinterpret_cast<void*>(region->first + block * kBlockBytes);
  region->second &= region->second - 1;
  ++num_used_;
  if (region->second == 0) free_blocks_.erase(region);
  return begin;
}

void BlockPool::Return(void* block) {
  auto address = reinterpret_cast<uintptr_t>(block);
  uintptr_t region = address & ~(kRegionBytes - 1);
  std::lock_guard lock(mutex_);
  --num_used_;
  uint64_t& free_blocks = free_blocks_[region];
  free_blocks |= uint64_t{1} << (address - region) / kBlockBytes;
  if (free_blocks != ~uint64_t{0} || free_blocks_.size() == 1) return;
  free_blocks_.erase(region);
  munmap(reinterpret_cast<void*>(region), kRegionBytes);
}

size_t BlockPool::UsedBytes() const {
  std::lock_guard lock(mutex_);
  return num_used_ * kBlockBytes;
}

void* BlockPool::MapRegion() {
  void* mapped = mmap(nullptr, 2 * kRegionBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto begin = reinterpret_cast<uintptr_t>(mapped);
  uintptr_t region = (begin + kRegionBytes - 1) & ~(kRegionBytes - 1);
  if (region > begin) munmap(mapped, region - begin);
  if (uintptr_t end = begin + 2 * kRegionBytes; end > region + kRegionBytes)
    munmap(reinterpret_cast<void*>(region + kRegionBytes), end - region - kRegionBytes);
  madvise(reinterpret_cast<void*>(region), kRegionBytes, MADV_HUGEPAGE);  // a wish: without it all works, slower
  return reinterpret_cast<void*>(region);
}

}  // namespace agentspec
