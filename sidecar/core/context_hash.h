// Hashes of the contexts that end at one place of a text, as tags of 32 bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "types.h"

namespace agentspec {

inline constexpr int kNumOrders = 6;
inline constexpr std::array<int, kNumOrders> kOrders = {1, 2, 4, 8, 16, 32};
inline constexpr int kMaxContext = 32;

// Contexts of 1, 2, 4 ... 32 tokens before one place, as many as there are; shortest first.
struct ContextTags {
  std::array<uint32_t, kNumOrders> tag;
  uint8_t num_orders = 0;
  bool is_whole = false;  // the last one reaches back to the start of the text (or block): no longer one exists
};

// Tokens are kept in 3 bytes each, little endian; kBlockStart is the largest value.
inline constexpr size_t kTokenBytes = 3;

// The token that ends before `end`; the byte before its first one must be readable.
inline Token LoadToken(const uint8_t* end) {
  int32_t raw;
  std::memcpy(&raw, end - 4, sizeof(raw));
  return raw >> 8;
}

inline void StoreToken(uint8_t* begin, Token token) { std::memcpy(begin, &token, kTokenBytes); }

// The hash of a context is a polynomial in kHashBase of its tokens' spread values, the last one's factor being 1.
inline constexpr uint64_t kHashBase = 0x9E3779B97F4A7C15ull;
inline constexpr auto kHashPowers = [] {
  std::array<uint64_t, kMaxContext + 1> powers{1};
  for (size_t i = 1; i < powers.size(); ++i) powers[i] = powers[i - 1] * kHashBase;
  return powers;
}();

// Spreads the few bits of a token id, so that sums do not cancel out.
inline uint64_t SpreadToken(Token token) {
  uint64_t value = (static_cast<uint32_t>(token) + 1) * 0xD6E8FEB86659FD93ull;
  return value ^ (value >> 32);
}

// `level`: index of its order.
inline uint32_t ContextTag(uint64_t hash, int level, bool is_whole) {
  constexpr uint64_t kWholeContext = 0x5151;
  hash = (hash ^ (is_whole ? kWholeContext : static_cast<uint64_t>(level))) * kHashBase;
  return static_cast<uint32_t>((hash ^ (hash >> 29)) >> 32);
}

// The end of a growing text: its last tokens, and hashes that roll along.
class TextWindow {
 public:
  // `is_strict`: a context never reaches back past any kBlockStart, else not past one at the start of the text.
  explicit TextWindow(bool is_strict) : is_strict_(is_strict) {}

  void Push(Token token);
  // Contexts of the place after the last token.
  ContextTags Tags() const;
  // One past the last token in kTokenBytes each; at least 8 bytes before the first are readable.
  const uint8_t* end() const { return bytes_.data() + end_; }
  int length() const { return length_; }  // tokens that can be read, at most kMaxContext

 private:
  static constexpr size_t kPadding = 8;
  static constexpr size_t kWindowBytes = kMaxContext * kTokenBytes;

  std::array<uint64_t, kNumOrders> hash_{};  // of the last tokens of each order, or of all that are visible
  bool is_strict_;
  bool begins_with_start_ = false;  // what is visible does
  uint8_t length_ = 0;
  uint8_t visible_ = 0;  // tokens that contexts may see, at most kMaxContext + 1
  uint16_t end_ = kPadding;
  std::array<uint8_t, kPadding + 2 * kWindowBytes> bytes_{};
};

}  // namespace agentspec
