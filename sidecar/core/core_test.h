// What the core's tests share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>

#define CHECK(fact)                                                        \
  do {                                                                     \
    if (!(fact)) {                                                         \
      std::fprintf(stderr, "%s:%d: not: %s\n", __FILE__, __LINE__, #fact); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace agentspec {

class Random {
 public:
  explicit Random(uint32_t seed) : generator_(seed) {}
  int Below(int limit) { return static_cast<int>(generator_() % static_cast<uint32_t>(limit)); }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<int>(values.size()))];
  }

 private:
  std::mt19937 generator_;
};

// Tables, windows, histories and drafts, without an engine around them.
void TestIndexes();

}  // namespace agentspec
