#include "budget.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

namespace agentspec {

namespace {

constexpr int kNumLevels = 1025;  // of survival

int LevelOf(float survival) { return static_cast<int>(std::clamp(survival, 0.0f, 1.0f) * (kNumLevels - 1)); }

// All draft tokens of a batch by survival.
struct TokenPool {
  std::array<int32_t, kNumLevels> num_tokens{}, num_rows{};  // tokens of a level; those that are the first of their row
  std::array<float, kNumLevels> survival{};                  // their sum

  explicit TokenPool(std::span<const RowDraft> rows) {
    for (const auto& row : rows) {
      for (int32_t i = 0; i < row.length; ++i) {
        float value = row.Survival(i) * row.trust;
        int level = LevelOf(value);
        ++num_tokens[level];
        survival[level] += value;
      }
      if (row.length > 0) ++num_rows[LevelOf(row.Survival(0) * row.trust)];
    }
  }
};

// Tokens down to and with `num_of_level` of a level, which are taken in the order of rows.
struct Cut {
  int level = kNumLevels;
  int32_t num_of_level = 0;
};

void CutRows(std::span<const RowDraft> rows, Cut cut, std::span<int32_t> budgets) {
  int32_t left = cut.num_of_level;
  for (size_t row = 0; row < rows.size(); ++row) {
    const RowDraft& draft = rows[row];
    auto level = [&](int32_t i) { return LevelOf(draft.Survival(i) * draft.trust); };
    int32_t end = 0;
    while (end < draft.length && level(end) > cut.level) ++end;
    for (; left > 0 && end < draft.length && level(end) == cut.level; --left) ++end;
    budgets[row] = end;
  }
}

}  // namespace

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

void AllocateUniformly(std::span<const RowDraft> rows, int64_t token_budget, std::span<int32_t> budgets) {
  if (rows.empty()) return;
  auto num_rows = static_cast<int64_t>(rows.size());
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t share = token_budget / num_rows + (row < token_budget % num_rows);
    budgets[row] = static_cast<int32_t>(std::min<int64_t>(share, rows[row].length));
  }
}

void AllocateFixed(std::span<const RowDraft> rows, int64_t token_budget, std::span<int32_t> budgets) {
  for (size_t row = 0; row < rows.size(); ++row) {
    budgets[row] = static_cast<int32_t>(std::min<int64_t>(token_budget, rows[row].length));
    token_budget -= budgets[row];
  }
}

GoodputChoice AllocateByGoodput(std::span<const RowDraft> rows, int64_t num_decode_rows, const StepCosts& costs,
                                std::span<int32_t> budgets) {
  TokenPool pool(rows);
  auto plain_tokens = static_cast<double>(num_decode_rows);
  double plain_time = costs.times[0];
  double best_tokens = plain_tokens, best_time = plain_time;
  // Higher is better: tokens per time, or, with a value of a token, time saved.
  auto is_better = [&](double tokens, double time) {
    if (costs.token_ms > 0) return (tokens - best_tokens) * costs.token_ms > time - best_time;
    return tokens * best_time > best_tokens * time;
  };
  Cut cut;
  GoodputChoice choice;
  double accepted = 0, row_time = 0;
  size_t num_tokens = 0;
  for (int level = kNumLevels - 1; level >= 0 && num_tokens + 1 < costs.times.size(); --level) {
    if (pool.num_tokens[level] == 0) continue;
    auto in_level = static_cast<double>(pool.num_tokens[level]);
    double survival = pool.survival[level] / in_level * costs.trust;
    double row_share = pool.num_rows[level] / in_level * costs.row_ms;
    for (int32_t i = 0; i < pool.num_tokens[level] && ++num_tokens < costs.times.size(); ++i) {
      accepted += survival;
      row_time += row_share;
      double tokens = plain_tokens + accepted, time = costs.times[num_tokens] + row_time;
      if (!is_better(tokens, time)) continue;
      best_tokens = tokens;
      best_time = time;
      cut = {level, i + 1};
      choice = {static_cast<int64_t>(num_tokens), accepted, pool.survival[level] / pool.num_tokens[level]};
    }
  }
  double worth = costs.token_ms > 0 ? (best_tokens - plain_tokens) * costs.token_ms - (best_time - plain_time)
                                    : best_tokens / plain_tokens * plain_time - best_time;
  if (worth < costs.min_gain * plain_time) {
    cut = {};
    choice = {};
  }
  CutRows(rows, cut, budgets);
  return choice;
}

}  // namespace agentspec
