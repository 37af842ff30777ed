// What drafts are really worth: probabilities of the vote corrected by what requests went on to write.
//
// Every draft is compared with the tokens that its request really generated next, verified or not ("in the shadow"), so
// the statistics cost no verification and have no selection bias. Two stages: the probability of one draft token, by
// the kind of its evidence; then the survival of a token with all before it, by predicted survival and depth.
#pragma once

#include <array>
#include <cstdint>

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
  static Cell CellOf(const Evidence& evidence);

  // Probability that the target model goes along with the token, when all before it were right.
  float Probability(Cell cell, float raw) const {
    const Count& count = tokens_[cell];
    return (count.accepted + kTokenPrior * raw) / (count.total + kTokenPrior);
  }
  // Observed survival of draft tokens at `depth` that were predicted to survive with `predicted`.
  float Survival(float predicted, int depth) const {
    const Count& count = survival_[SurvivalCell(predicted, depth)];
    return (count.accepted + kSurvivalPrior * predicted) / (count.total + kSurvivalPrior);
  }

  void RecordToken(Cell cell, bool is_accepted) { tokens_[cell].Add(is_accepted); }
  void RecordSurvival(float predicted, int depth, bool is_accepted) {
    survival_[SurvivalCell(predicted, depth)].Add(is_accepted);
  }

 private:
  static constexpr float kTokenPrior = 6;      // observations that the raw vote counts for
  static constexpr float kSurvivalPrior = 20;  // the same for the predicted survival
  static constexpr float kMemory = 4000;       // observations; older ones fade out

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
  static constexpr int kSources = 3, kDepths = 2, kMatches = 8, kSupports = 5, kConsensus = 5;
  static constexpr int kSurvivals = 16, kSurvivalDepths = 7;
  static int SurvivalCell(float predicted, int depth);

  std::array<Count, kSources * kDepths * kMatches * kSupports * kConsensus> tokens_;
  std::array<Count, kSurvivals * kSurvivalDepths> survival_;
};

}  // namespace agentspec
