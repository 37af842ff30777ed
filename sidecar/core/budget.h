// How many draft tokens each row of a batch may verify.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace agentspec {

enum class Policy { kGoodput = 0, kRedundancy = 1, kUniform = 2, kFixed = 3, kOff = 4, kShadow = 5 };

// What one row of a batch has drafted.
struct RowDraft {
  const float* survival = nullptr;  // of the first token; never rises from token to token
  int32_t length = 0;
  float redundancy = 0;  // in [0, 1]
  float trust = 1;       // share of its survival that the goodput policy believes, in [0, 1]
  int32_t stride = 1;    // floats from one token's survival to the next one's

  float Survival(int32_t i) const { return survival[i * stride]; }
};

// What the goodput policy weighs.
struct StepCosts {
  std::span<const float> times;  // of the step with 0, 1, ... draft tokens, ms, > 0, never falling; not empty
  float row_ms = 0;              // what each row that drafts adds
  float trust = 1;               // accepted tokens per token that survival promises, in (0, 1]
  float min_gain = 0;            // drafts that bring less than this share of plain decoding are not verified
  float token_ms = 0;            // value of an output token; 0: what it costs in this very step
};

struct GoodputChoice {
  int64_t num_draft_tokens = 0;
  double num_accepted_tokens = 0;  // expected
  float marginal_survival = 1;     // of the last token that was admitted
};

// Splits `token_budget` over the rows in proportion to their redundancy score; no row gets more than it has drafted,
// and what it cannot use goes to the others. Each round gives every row that still has room the whole tokens of its
// share; when all shares are below one token, the highest scores get one each (equal scores: the earlier row). Rows
// with score 0 get nothing. Source: AgentSpec (arXiv 2608.24004), redundancy-aware budget allocation; the rounding and
// the return of unused shares are ours (D-009).
//
// `scores` are in [0, 1], `lengths` >= 0; both have `num_rows` entries, as has the result `budgets`, which never sums
// to more than `token_budget`.
void AllocateByRedundancy(const float* scores, const int32_t* lengths, size_t num_rows, int64_t token_budget,
                          int32_t* budgets);

// The same share of `token_budget` for each row, the odd tokens to the first rows; what a row cannot use is lost.
void AllocateUniformly(std::span<const RowDraft> rows, int64_t token_budget, std::span<int32_t> budgets);

// Each row all that it has drafted, in order, as far as `token_budget` goes.
void AllocateFixed(std::span<const RowDraft> rows, int64_t token_budget, std::span<int32_t> budgets);

// Admits draft tokens anywhere in the batch in order of survival, as many as make the tokens of the step (one for each
// of `num_decode_rows`, and those that are accepted) per time highest; survival counts in steps of 1/1024. None where
// the best choice gains less than `min_gain` over plain decoding. Never more than `costs.times.size() - 1` tokens.
GoodputChoice AllocateByGoodput(std::span<const RowDraft> rows, int64_t num_decode_rows, const StepCosts& costs,
                                std::span<int32_t> budgets);

}  // namespace agentspec
