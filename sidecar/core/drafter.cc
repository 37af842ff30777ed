#include "drafter.h"

#include <algorithm>
#include <cmath>

namespace agentspec {

Drafter::Drafter(DraftWeights weights, bool is_strict) : weights_(weights), is_strict_(is_strict) {
  for (int length = 0; length <= kMaxContext; ++length)
    match_weight_[length] =
        std::exp(weights_.per_matched_token * static_cast<float>(std::min(length, weights_.max_matched_tokens)));
}

void Drafter::Gather(const Query& query) {
  std::array<Position, ContextIndex::kBucketPositions> positions;
  int begin = num_candidates_;
  int num_positions = query.index->Positions(query.lookup.value, positions.data());
  for (int i = 0; i < num_positions; ++i) Add(query, positions[i]);
  int num_found = num_candidates_ - begin;
  if (num_found >= weights_.min_candidates) return;
  num_positions = query.index->Positions(query.lookup.shorter_value, positions.data());
  for (int i = 0; i < num_positions && num_candidates_ - begin < weights_.min_candidates; ++i) {
    const auto* page = &query.index->page(positions[i] / ContextIndex::kPageTokens);
    uint32_t offset = positions[i] % ContextIndex::kPageTokens;
    auto* first = candidates_.data() + begin;
    if (std::none_of(first, first + num_found,
                     [&](auto& known) { return known.page == page && known.offset == offset; }))
      Add(query, positions[i]);
  }
}

void Drafter::Add(const Query& query, Position position) {
  const auto& page = query.index->page(position / ContextIndex::kPageTokens);
  uint32_t offset = position % ContextIndex::kPageTokens;
  bool is_other_block = page.label != query.label && page.label != kPromptLabel;
  if (is_strict_ && is_other_block) return;
  if (!query.is_own && page.writer == query.writer) return;  // its own text votes as own evidence
  if (num_candidates_ == kMaxCandidates) return;
  int match_length = query.index->MatchLength(position, *query.text);
  if (match_length == 0) return;  // two contexts with the same hash
  float weight = match_weight_[match_length];
  if (query.is_own) {
    weight *= weights_.own;
  } else {
    if (page.workflow != query.workflow) weight *= weights_.other_workflow;
    if (is_other_block) weight *= weights_.other_block;
  }
  candidates_[num_candidates_++] = {page[offset],
                                    weight,
                                    &page,
                                    query.index,
                                    static_cast<uint8_t>(offset),
                                    static_cast<uint8_t>(page.fill),
                                    static_cast<uint8_t>(match_length),
                                    query.is_own,
                                    page.label};
}

bool Drafter::Advance(Candidate& candidate) const {
  do {
    if (++candidate.offset == candidate.fill) {
      uint32_t index = candidate.page->next;
      if (index == ContextIndex::kNoPage) return false;
      candidate.page = &candidate.index->page(index);
      if (is_strict_ && (candidate.page->label != candidate.label || candidate.page->starts_block)) return false;
      candidate.offset = 0;
      candidate.fill = static_cast<uint8_t>(candidate.page->fill);
    }
    candidate.next = (*candidate.page)[candidate.offset];
    if (is_strict_ && candidate.next == kBlockStart) return false;
  } while (candidate.next == kBlockStart);
  return true;
}

inline Drafter::Winner Drafter::Winner::Of(const Candidate& candidate) {
  return {candidate.next, candidate.weight, 1, candidate.match_length, candidate.is_own, !candidate.is_own};
}

inline void Drafter::Winner::Add(const Candidate& candidate) {
  weight += candidate.weight;
  support += 1;
  match_length = std::max<int>(match_length, candidate.match_length);
  (candidate.is_own ? is_own : is_shared) = true;
}

Drafter::Winner Drafter::Poll(float& total) const {
  const Candidate* end = candidates_.data() + num_candidates_;
  const Candidate* other = candidates_.data() + 1;
  Winner first = Winner::Of(candidates_[0]);
  for (; other != end && other->next == first.token; ++other) first.Add(*other);
  total = first.weight;
  if (other == end) return first;

  std::array<Winner, kMaxCandidates> polled;
  polled[0] = first;
  int num_polled = 1;
  for (; other != end; ++other) {
    total += other->weight;
    int i = 0;
    while (i < num_polled && polled[i].token != other->next) ++i;
    if (i < num_polled)
      polled[i].Add(*other);
    else
      polled[num_polled++] = Winner::Of(*other);
  }
  return *std::max_element(polled.begin(), polled.begin() + num_polled,
                           [](const Winner& a, const Winner& b) { return a.weight < b.weight; });
}

void Drafter::Follow(Token token) {
  int num_left = 0;
  for (int i = 0; i < num_candidates_; ++i) {
    Candidate& candidate = candidates_[i];
    if (candidate.next != token || !Advance(candidate)) continue;
    if (num_left != i) candidates_[num_left] = candidate;
    ++num_left;
  }
  num_candidates_ = num_left;
}

void Drafter::Vote(int max_length, float min_survival, const Calibration& calibration, Draft& draft) {
  draft.length = 0;
  draft.redundancy = 0;
  float predicted = 1;
  float survival = 1;
  while (draft.length < max_length && num_candidates_ > 0) {
    int depth = draft.length;
    float total;
    Winner winner = Poll(total);
    int match_length = winner.match_length + depth;
    // Never-seen continuations get the weight of one candidate, less the longer the match has proved itself.
    float escape = weights_.escape * match_weight_[winner.match_length] / static_cast<float>(1 + match_length);
    float consensus = winner.weight / total;
    auto cell = Calibration::CellOf(
        {winner.is_own, winner.is_shared, depth, match_length, winner.support, std::min(consensus, 1.0f)});
    predicted *= calibration.Probability(cell, winner.weight / (total + escape));
    survival = std::min(survival, calibration.Survival(predicted, depth));
    if (depth == 0) {
      auto support = static_cast<float>(winner.support);
      draft.redundancy = std::min(1.0f, consensus) * support / (support + weights_.support_half);
    }
    // The first token is followed at any rate: evidence that nobody follows would never be believed again.
    if (depth > 0 && survival < min_survival) return;
    draft.tokens[depth] = {winner.token, survival, predicted, cell};
    ++draft.length;
    if (draft.length < max_length) Follow(winner.token);
  }
}

}  // namespace agentspec
