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
  for (int i = 0; i < num_positions; ++i) Add(query, positions[i], begin);
  if (num_candidates_ - begin >= weights_.min_candidates) return;
  num_positions = query.index->Positions(query.lookup.shorter_value, positions.data());
  for (int i = 0; i < num_positions && num_candidates_ - begin < weights_.min_candidates; ++i)
    Add(query, positions[i], begin);
}

void Drafter::Add(const Query& query, Position position, int begin) {
  uint32_t page = position / ContextIndex::kPageTokens;
  const auto& header = query.index->Header(page);
  bool is_other_block = header.label != query.label && header.label != kPromptLabel;
  if (is_strict_ && is_other_block) return;
  if (!query.is_own && header.writer == query.writer) return;  // its own text votes as own evidence
  if (num_candidates_ == kMaxCandidates) return;
  const Token* text = query.index->PageText(page);
  const Token* next = text + position % ContextIndex::kPageTokens;
  for (int i = begin; i < num_candidates_; ++i)
    if (candidates_[i].next == next) return;
  int match_length = query.index->MatchLength(position, query.text, query.length);
  if (match_length == 0) return;  // two contexts with the same hash
  float weight = match_weight_[match_length];
  if (query.is_own) {
    weight *= weights_.own;
  } else {
    if (header.workflow != query.workflow) weight *= weights_.other_workflow;
    if (is_other_block) weight *= weights_.other_block;
  }
  candidates_[num_candidates_++] = {next,         text + header.fill, query.index, page,
                                    header.label, match_length,       weight,      query.is_own};
}

void Drafter::Advance(Candidate& candidate) const {
  do {
    if (++candidate.next == candidate.page_end) {
      uint32_t page = candidate.index->Header(candidate.page).next;
      if (page == ContextIndex::kNoPage || (is_strict_ && (candidate.index->Header(page).label != candidate.label ||
                                                           candidate.index->Header(page).starts_block))) {
        candidate.next = nullptr;
        return;
      }
      candidate.page = page;
      candidate.next = candidate.index->PageText(page);
      candidate.page_end = candidate.next + candidate.index->Header(page).fill;
    }
    if (is_strict_ && *candidate.next == kBlockStart) {
      candidate.next = nullptr;
      return;
    }
  } while (*candidate.next == kBlockStart);
}

Drafter::Winner Drafter::Poll() const {
  Winner polled[kMaxCandidates];  // the first num_polled entries
  int num_polled = 0;
  float total = 0;
  for (int i = 0; i < num_candidates_; ++i) {
    const Candidate& candidate = candidates_[i];
    total += candidate.weight;
    int j = 0;
    while (j < num_polled && polled[j].token != *candidate.next) ++j;
    if (j == num_polled) polled[num_polled++] = {*candidate.next, 0, 0, 0, 0, false, false};
    polled[j].weight += candidate.weight;
    polled[j].support += 1;
    polled[j].match_length = std::max(polled[j].match_length, candidate.match_length);
    (candidate.is_own ? polled[j].is_own : polled[j].is_shared) = true;
  }
  if (num_polled == 0) return {kBlockStart, 0, 0, 0, 0, false, false};
  Winner best = *std::max_element(polled, polled + num_polled,
                                  [](const Winner& a, const Winner& b) { return a.weight < b.weight; });
  best.total = total;
  return best;
}

void Drafter::Vote(int max_length, const Calibration& calibration, Draft& draft) {
  draft.length = 0;
  draft.redundancy = 0;
  float predicted = 1;
  float survival = 1;
  while (draft.length < max_length) {
    int depth = draft.length;
    Winner winner = Poll();
    if (winner.support == 0) return;
    int match_length = winner.match_length + depth;
    // Never-seen continuations get the weight of one candidate, less the longer the match has proved itself.
    float escape = weights_.escape * match_weight_[winner.match_length] / static_cast<float>(1 + match_length);
    float consensus = winner.weight / winner.total;
    auto cell = Calibration::CellOf(
        {winner.is_own, winner.is_shared, depth, match_length, winner.support, std::min(consensus, 1.0f)});
    predicted *= calibration.Probability(cell, winner.weight / (winner.total + escape));
    survival = std::min(survival, calibration.Survival(predicted, depth));
    if (depth == 0) {
      auto support = static_cast<float>(winner.support);
      draft.redundancy = std::min(1.0f, consensus) * support / (support + weights_.support_half);
    }
    // The first token is followed at any rate: evidence that nobody follows would never be believed again.
    if (depth > 0 && survival < weights_.min_survival) return;
    draft.tokens[depth] = winner.token;
    draft.predicted[depth] = predicted;
    draft.survival[depth] = survival;
    draft.cell[depth] = cell;
    ++draft.length;
    int num_alive = 0;
    for (int i = 0; i < num_candidates_; ++i) {
      Candidate& candidate = candidates_[i];
      if (*candidate.next != winner.token) continue;
      Advance(candidate);
      if (candidate.next != nullptr) candidates_[num_alive++] = candidate;
    }
    num_candidates_ = num_alive;
  }
}

}  // namespace agentspec
