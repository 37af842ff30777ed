// What drafts are really worth: probabilities of the vote corrected by what requests went on to write.
//
// Every draft is compared with the tokens that its request really generated next, verified or not ("in the shadow"), so
// the statistics cost no verification and have no selection bias. Two stages: the probability of one draft token, by
// the kind of its evidence; then the survival of a token with all before it, by predicted survival and depth.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "types.h"

namespace agentspec {

// What speaks for one draft token.
struct Evidence {
  bool is_own;       // text of the request itself
  bool is_shared;    // text of others
  int depth;         // of the token in its draft
  int match_length;  // longest context that matched, tokens of the draft included
  int support;       // candidates that continue with it
  float consensus;   // their share of the weight, in [0, 1]
};

class Calibration {
 public:
  using Cell = uint16_t;
  struct Count {
    float accepted = 0;
    float total = 0;
    void Add(bool is_accepted) {
      accepted += is_accepted;
      total += 1;
      if (total > kMemory) {
        accepted /= 2;
        total /= 2;
      }
    }
  };
  explicit Calibration(bool has_prior) : has_prior_(has_prior) {}
  // What was observed: all cells of the first stage, then all of the second.
  std::vector<Count> Counts() const;
  static Cell CellOf(const Evidence& evidence);

  // Probability that the target model goes along with the token, when all before it were right.
  float Probability(Cell cell, float raw) const {
    const Count& count = tokens_[cell];
    float prior = has_prior_ && kPriorShares[cell] >= 0 ? kPriorShares[cell] : raw;
    return (count.accepted + kTokenPrior * prior) / (count.total + kTokenPrior);
  }
  // Observed survival of draft tokens at `depth` that were predicted to survive with `predicted`.
  float Survival(float predicted, int depth) const {
    int cell = SurvivalCell(predicted, depth);
    const Count& count = survival_[cell];
    float prior =
        has_prior_ && kPriorShares[kNumTokenCells + cell] >= 0 ? kPriorShares[kNumTokenCells + cell] : predicted;
    return (count.accepted + kSurvivalPrior * prior) / (count.total + kSurvivalPrior);
  }

  // How far its corrections can be relied on, in [0, 1): little while few drafts have been compared.
  float Maturity() const {
    float num_drafts = num_drafts_ + (has_prior_ ? 3 * kColdDrafts : 0);
    return num_drafts / (num_drafts + kColdDrafts);
  }

  void RecordDraft() { num_drafts_ += 1; }
  void RecordToken(Cell cell, bool is_accepted) { tokens_[cell].Add(is_accepted); }
  void RecordSurvival(float predicted, int depth, bool is_accepted) {
    survival_[SurvivalCell(predicted, depth)].Add(is_accepted);
  }

 private:
  static constexpr float kTokenPrior = 6;      // observations that the raw vote counts for
  static constexpr float kSurvivalPrior = 20;  // the same for the predicted survival
  static constexpr float kColdDrafts = 60;     // drafts compared until the corrections are half relied on
  static constexpr float kMemory = 4000;       // observations; older ones fade out

  static constexpr int kSources = 3, kDepths = 2, kMatches = 8, kSupports = 5, kConsensus = 5;
  static constexpr int kSurvivals = 16, kSurvivalDepths = 7;
  static constexpr int kNumTokenCells = kSources * kDepths * kMatches * kSupports * kConsensus;
  static constexpr int kNumSurvivalCells = kSurvivals * kSurvivalDepths;
  static const std::array<float, kNumTokenCells + kNumSurvivalCells> kPriorShares;  // -1: unknown
  static int SurvivalCell(float predicted, int depth);

  bool has_prior_;
  std::array<Count, kNumTokenCells> tokens_;
  std::array<Count, kNumSurvivalCells> survival_;
  float num_drafts_ = 0;
};

}  // namespace agentspec
