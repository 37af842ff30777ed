#include "history.h"

#include <algorithm>

namespace agentspec {

size_t History::Append(Chain& chain, std::span<const FiledToken> tokens, TextSource source) {
  if (chain.generation != generation_) chain = {generation_, ContextIndex::kNoPage};
  size_t num_appended = current_->Append(tokens, source, chain.page);
  if (num_appended > 0) current_written_[source.workflow] += num_appended;
  return num_appended;
}

void History::Rotate() {
  previous_ = current_->is_empty() ? nullptr : std::move(current_);
  previous_written_ = std::exchange(current_written_, {});
  current_ = std::make_shared<ContextIndex>(is_strict_);
  ++generation_;
}

std::vector<std::shared_ptr<const ContextIndex>> History::Generations() const {
  if (previous_) return {previous_, current_};
  return {current_};
}

bool History::HasOtherWriters(uint16_t writer) const {
  return std::ranges::any_of(std::array{&current_written_, &previous_written_}, [&](const Written* written) {
    return written->size() > 1 || (written->size() == 1 && !written->contains(writer));
  });
}

std::optional<uint16_t> History::SoleWriter() const {
  const Written& written = current_written_.empty() ? previous_written_ : current_written_;
  if (written.empty() || HasOtherWriters(written.begin()->first)) return {};
  return written.begin()->first;
}

void History::CheckIntegrity() const {
  current_->CheckIntegrity();
  if (previous_) previous_->CheckIntegrity();
}

}  // namespace agentspec
