// How many draft tokens each row of a batch may verify.
#pragma once

#include <cstddef>
#include <cstdint>

namespace agentspec {

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

}  // namespace agentspec
