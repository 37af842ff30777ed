#include "budget.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace agentspec {

void AllocateByRedundancy(const float* scores, const int32_t* lengths, size_t num_rows, int64_t token_budget,
                          int32_t* budgets) {
  std::fill_n(budgets, num_rows, 0);
  int64_t total_length = 0;
  for (size_t row = 0; row < num_rows; ++row)
    if (scores[row] > 0) total_length += lengths[row];
  if (total_length <= token_budget) {
    for (size_t row = 0; row < num_rows; ++row)
      if (scores[row] > 0) budgets[row] = lengths[row];
    return;
  }
  std::vector<size_t> open(num_rows);  // rows with room, highest score first
  std::iota(open.begin(), open.end(), size_t{0});
  auto is_full = [&](size_t row) { return scores[row] <= 0 || budgets[row] >= lengths[row]; };
  std::erase_if(open, is_full);
  std::stable_sort(open.begin(), open.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  for (int64_t left = token_budget; left > 0 && !open.empty();) {
    double total_score = 0;
    for (size_t row : open) total_score += scores[row];
    int64_t given = 0;
    for (size_t row : open) {
      auto share = static_cast<int64_t>(static_cast<double>(left) * scores[row] / total_score);
      auto grant = static_cast<int32_t>(std::min<int64_t>({share, left - given, lengths[row] - budgets[row]}));
      budgets[row] += grant;
      given += grant;
    }
    if (given == 0) {
      for (size_t row : open) {
        if (given == left) break;
        ++budgets[row];
        ++given;
      }
    }
    left -= given;
    std::erase_if(open, is_full);
  }
}

}  // namespace agentspec
