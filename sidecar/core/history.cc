#include "history.h"

namespace agentspec {

void History::Append(Chain& chain, std::span<const FiledToken> tokens, TextSource source) {
  while (true) {
    if (chain.generation != generation_) chain = {generation_, ContextIndex::kNoPage};
    tokens = tokens.subspan(current_->Append(tokens, source, chain.page));
    if (tokens.empty()) return;
    Rotate();
  }
}

void History::Rotate() {
  previous_ = current_->is_empty() ? nullptr : std::move(current_);
  current_ = std::make_shared<ContextIndex>(is_strict_);
  ++generation_;
}

std::vector<std::shared_ptr<const ContextIndex>> History::Generations() const {
  if (previous_) return {previous_, current_};
  return {current_};
}

void History::CheckIntegrity() const {
  current_->CheckIntegrity();
  if (previous_) previous_->CheckIntegrity();
}

}  // namespace agentspec
