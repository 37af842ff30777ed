#include "context_hash.h"

#include <algorithm>

namespace agentspec {

void TextWindow::Push(Token token) {
  bool is_wall = token == kBlockStart && (is_strict_ || length_ == 0);
  if (is_wall) {
    visible_ = 0;
    hash_ = {};
  }
  if (visible_ == 0) begins_with_start_ = is_wall;
  uint64_t spread = SpreadToken(token);
  for (int level = 0; level < kNumOrders; ++level) {
    hash_[level] = hash_[level] * kHashBase + spread;
    if (visible_ < kOrders[level]) continue;
    Token leaving = LoadToken(end() - static_cast<size_t>(kOrders[level] - 1) * kTokenBytes);
    hash_[level] -= SpreadToken(leaving) * kHashPowers[kOrders[level]];
  }
  visible_ = std::min<uint8_t>(visible_ + 1, kMaxContext + 1);
  length_ = std::min<uint8_t>(length_ + 1, kMaxContext);
  if (end_ == bytes_.size()) {
    std::copy_n(bytes_.end() - kWindowBytes, kWindowBytes, bytes_.begin() + kPadding);
    end_ = kPadding + kWindowBytes;
  }
  StoreToken(bytes_.data() + end_, token);
  end_ += kTokenBytes;
}

ContextTags TextWindow::Tags() const {
  ContextTags tags;
  for (int level = 0; level < kNumOrders && !tags.is_whole; ++level) {
    tags.is_whole = begins_with_start_ && kOrders[level] >= visible_;
    if (kOrders[level] > visible_ && !tags.is_whole) break;
    tags.tag[tags.num_orders++] = ContextTag(hash_[level], level, tags.is_whole);
  }
  return tags;
}

}  // namespace agentspec
