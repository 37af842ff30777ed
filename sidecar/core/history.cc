#include "history.h"

namespace agentspec {

void History::Append(Chain& chain, Token token, const ContextHashes& hashes, Label label, uint32_t writer,
                     uint16_t workflow) {
  if (chain.generation != generation_) chain = {generation_, ContextIndex::kNoPage};
  uint32_t page = current_->Append(chain.page, token, hashes, label, writer, workflow);
  if (page == ContextIndex::kNoPage) {
    Rotate();
    chain = {generation_, ContextIndex::kNoPage};
    page = current_->Append(chain.page, token, hashes, label, writer, workflow);
  }
  chain.page = page;
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
