#include "bucket_pool.h"

namespace agentspec {

uint32_t BucketPool::Add(int size) {
  if (free_[size] == kNone) {
    if (size == kNumSizes - 1) return lines_.Add() * 4;
    uint32_t larger = Add(size + 1);
    Free(larger + (1u << size), size);
    return larger;
  }
  uint32_t bucket = free_[size];
  free_[size] = (*this)[bucket][0];
  return bucket;
}

void BucketPool::Free(uint32_t bucket, int size) {
  (*this)[bucket][0] = free_[size];
  free_[size] = bucket;
}

}  // namespace agentspec
