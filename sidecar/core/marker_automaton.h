// Finds a set of markers in a stream of bytes: Aho-Corasick, with a table over the classes of symbols it tells apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace agentspec {

class MarkerAutomaton {
 public:
  using State = uint16_t;
  using Symbol = uint16_t;  // a byte, or kOutputStart
  using Marker = std::vector<Symbol>;
  static constexpr Symbol kOutputStart = 256;
  static constexpr State kRoot = 0;

  // None of the markers is empty; fewer than 65,535 symbols in all.
  explicit MarkerAutomaton(const std::vector<Marker>& markers);

  State Next(State state, Symbol symbol) const { return next_[state * num_classes_ + class_of_[symbol]]; }
  // Number of the set of markers that are complete in `state`; 0: none is.
  uint16_t Found(State state) const { return found_[state]; }
  // By number of the set: indices of the markers, the longest first.
  const std::vector<std::vector<uint16_t>>& sets() const { return sets_; }
  size_t MemoryBytes() const;

 private:
  void Add(const std::vector<Marker>& markers);
  void LinkFailures();

  std::array<uint16_t, kOutputStart + 1> class_of_{};  // 0: the symbol is in no marker
  size_t num_classes_ = 1;
  std::vector<State> next_;      // by state and class
  std::vector<uint16_t> found_;  // by state
  std::vector<std::vector<uint16_t>> sets_;
};

}  // namespace agentspec
