#include "budget_planner.h"

#include <algorithm>
#include <cmath>

namespace agentspec {

namespace {

constexpr float kMinFloor = 0.002f, kMaxFloor = 0.25f;  // of the survival at which drafting ends
constexpr float kLearnedSurvival = 0.02f;               // the other policies draft down to here, to learn
constexpr uint64_t kFullDraftSteps = 8;                 // every so many steps drafts go down to kMinFloor
constexpr double kVerdictMemory = 0.98;                 // a step; of realised against promised acceptance
constexpr float kMinTrust = 0.3f;
constexpr double kGateMemory = 0.98;  // a step: the last 50 count
constexpr int kGateSteps = 20;        // verified drafts before the gate judges
constexpr int kMinGateLength = 32, kMaxGateLength = 512;
constexpr double kClockTrust = 0.1;    // a measured step counts as at most so much off the prediction
constexpr int kIdleSteps = 4;          // drafting for nothing before it backs off
constexpr double kIdleShare = 0.0002;  // of step time that drafting for nothing may take
constexpr int kMaxSkippedSteps = 32;
constexpr int kMinPlainProbeSteps = 4;
constexpr int kMaxPlainProbeSteps = 64;  // between steps without drafts, where the cost model needs them
constexpr double kPlainProbeDeviation = 0.03;
// Where nothing seems to pay, a few draft tokens now and then tell whether that is true: while the cost model knows
// their cost worse than to a share, or than that much of a step, and as long as all probes together lose no more than a
// share.
constexpr std::array<size_t, 4> kProbeTokens = {8, 32, 2, 16};  // in turn, to tell a step in cost from a slope
constexpr double kProbeDeviation = 0.05, kMinProbeDeviation = 0.002, kProbeShare = 0.0002, kMaxProbeCredit = 0.05;
constexpr double kDraftTimeMemory = 0.95;

}  // namespace

BudgetPlanner::BudgetPlanner(const BudgetOptions& options)
    : options_(options), cost_model_(options.prior), draft_us_per_row_(std::max(0.0, options.draft_us)) {}

BudgetStats& BudgetPlanner::StatsOf(int64_t num_rows) {
  constexpr std::array<int64_t, kNumBuckets - 1> kEdges = {1, 8, 32, 64, 128};
  return stats_[std::lower_bound(kEdges.begin(), kEdges.end(), num_rows) - kEdges.begin()];
}

StepShape BudgetPlanner::ShapeOf(const NextStep& next, int64_t num_draft_tokens) const {
  return {next.num_decode_rows,    num_draft_tokens,      std::min(num_draft_tokens, next.num_drafting_rows),
          next.num_prefill_tokens, next.num_sampled_rows, next.num_context_tokens};
}

float BudgetPlanner::trust() const {
  // Only what is more than chance is corrected, and only downwards.
  double share = (realised_ + std::sqrt(promised_) + 1) / (promised_ + 1e-9);
  return std::clamp(static_cast<float>(share), kMinTrust, 1.0f);
}

void BudgetPlanner::AddVerdict(double num_expected, int64_t num_draft_tokens, int64_t num_accepted_tokens) {
  running_.num_expected += num_expected;
  running_.num_draft_tokens += num_draft_tokens;
  running_.num_accepted += num_accepted_tokens;
}

void BudgetPlanner::Finish(const StepShape& shape, double duration_ms) {
  double predicted_ms = cost_model_.Predict(shape);
  bool had_level = cost_model_.has_level();
  if (!cost_model_.Observe(shape, duration_ms)) return;
  BudgetStats& stats = StatsOf(shape.num_decode_rows);
  stats.step_ms += duration_ms;
  stats.predicted_ms += had_level ? predicted_ms : duration_ms;
  if (shape.num_draft_tokens == 0 && cost_model_.is_surprised()) plain_probe_after_ = kMinPlainProbeSteps;
  if (shape.num_draft_tokens == 0 || shape.num_decode_rows == 0) return;
  StepShape plain = shape;
  plain.num_draft_tokens = plain.num_draft_rows = 0;
  double plain_ms = cost_model_.Predict(plain);
  predicted_ms = cost_model_.Predict(shape);  // with what was just learned: the level may have moved
  double ms = std::clamp(duration_ms, predicted_ms * (1 - kClockTrust), predicted_ms * (1 + kClockTrust));
  double gain = static_cast<double>(running_.num_accepted) / static_cast<double>(shape.num_decode_rows) * plain_ms;
  double saved_ms = gain - (ms + running_.draft_ms - plain_ms);
  stats.saved_ms += saved_ms;
  WatchGate(saved_ms / plain_ms);
}

void BudgetPlanner::WatchGate(double advantage) {
  gate_mean_ = kGateMemory * gate_mean_ + (1 - kGateMemory) * advantage;
  gate_square_ = kGateMemory * gate_square_ + (1 - kGateMemory) * advantage * advantage;
  if (++gate_count_ < kGateSteps) return;
  double share = 1 - std::pow(kGateMemory, gate_count_);  // of the weights, until the memory is full
  double mean = gate_mean_ / share, variance = std::max(0.0, gate_square_ / share - mean * mean);
  double error = std::sqrt(variance / std::min(gate_count_, 50));
  if (mean > error) gate_length_ = 0;
  if (mean + error >= 0) return;
  gate_length_ = std::clamp(gate_length_ * 2, kMinGateLength, kMaxGateLength);
  gate_steps_left_ = gate_length_;
  gate_mean_ = gate_square_ = 0;
  gate_count_ = 0;
  ++num_gate_closings_;
}

BudgetPlanner::Plan BudgetPlanner::Begin(const NextStep& next) {
  BudgetStats& last = StatsOf(next_.num_decode_rows);
  // They fade also while nothing is verified: what has been learned in the shadow since gets its chance.
  promised_ = kVerdictMemory * promised_ + running_.num_expected;
  realised_ = kVerdictMemory * realised_ + static_cast<double>(running_.num_accepted);
  last.num_accepted_tokens += running_.num_accepted;
  running_ = {};
  next_ = next;
  ++num_planned_;
  BudgetStats& stats = StatsOf(next.num_decode_rows);
  ++stats.num_steps;
  if (options_.policy == Policy::kOff || next.token_budget <= 0 || next.num_drafting_rows == 0) {
    num_steps_to_skip_ = 0;
    return {false, 0};
  }
  if (!IsByCost()) {
    num_steps_to_skip_ = 0;
    return {FreeTokens() > 0, std::min(kLearnedSurvival, options_.min_survival)};
  }
  step_ms_ = cost_model_.Predict(ShapeOf(next, 0));
  if (gate_steps_left_ > 0 && --gate_steps_left_ > 0 && num_steps_to_skip_ == 0)
    num_steps_to_skip_ = std::min(gate_steps_left_, kMaxSkippedSteps);
  if (num_steps_to_skip_ > 0) {
    --num_steps_to_skip_;
    ++stats.num_skipped_steps;
    return {false, 0};
  }
  if (IsPlainProbeDue()) return {false, 0};
  float floor = std::clamp(marginal_survival_ / 2, kMinFloor, kMaxFloor);
  return {true, num_planned_ % kFullDraftSteps == 0 ? kMinFloor : floor};
}

bool BudgetPlanner::IsPlainProbeDue() {
  if (num_drafting_ < plain_probe_after_) return false;
  num_drafting_ = 0;
  int64_t num_draft_tokens = std::max<int64_t>(1, next_.num_drafting_rows);
  if (cost_model_.RatioDeviation(ShapeOf(next_, num_draft_tokens), ShapeOf(next_, 0)) < kPlainProbeDeviation)
    return false;
  plain_probe_after_ = std::min(2 * plain_probe_after_, kMaxPlainProbeSteps);
  return true;
}

int64_t BudgetPlanner::FreeTokens() const {
  if (options_.intensity_limit <= 0 || options_.policy == Policy::kFixed) return next_.token_budget;
  double left = options_.intensity_limit - static_cast<double>(next_.num_decode_rows + next_.num_prefill_tokens);
  return std::min(next_.token_budget, static_cast<int64_t>(std::max(0.0, left)));
}

void BudgetPlanner::Allocate(std::span<RowDraft> rows, double draft_us, std::span<int32_t> budgets) {
  auto num_rows = static_cast<double>(std::max<int64_t>(1, next_.num_drafting_rows));
  if (options_.draft_us < 0) {
    double per_row = draft_us / num_rows;
    draft_us_per_row_ = draft_us_per_row_ == 0 ? per_row
                                               : kDraftTimeMemory * draft_us_per_row_ +
                                                     (1 - kDraftTimeMemory) * std::min(per_row, 4 * draft_us_per_row_);
  }
  running_.draft_ms = draft_us_per_row_ * num_rows / 1000;
  BudgetStats& stats = StatsOf(next_.num_decode_rows);
  stats.draft_ms += running_.draft_ms;
  if (IsByCost()) return AllocateByCost(rows, budgets);
  AllocateByRule(rows, budgets);
  for (size_t row = 0; row < rows.size(); ++row) {
    stats.num_draft_tokens += budgets[row];
    for (int32_t i = 0; i < budgets[row]; ++i) stats.num_expected_tokens += rows[row].Survival(i);
  }
  stats.num_draft_steps += std::any_of(budgets.begin(), budgets.end(), [](int32_t budget) { return budget > 0; });
}

void BudgetPlanner::AllocateByRule(std::span<RowDraft> rows, std::span<int32_t> budgets) const {
  for (auto& row : rows) {
    int32_t length = 0;
    while (length < row.length && row.Survival(length) >= options_.min_survival) ++length;
    row.length = length;
  }
  if (options_.policy == Policy::kUniform) return AllocateUniformly(rows, FreeTokens(), budgets);
  if (options_.policy == Policy::kFixed) return AllocateFixed(rows, FreeTokens(), budgets);
  std::vector<float> scores;
  std::vector<int32_t> lengths;
  for (const auto& row : rows) {
    scores.push_back(row.redundancy);
    lengths.push_back(row.length);
  }
  AllocateByRedundancy(scores.data(), lengths.data(), rows.size(), FreeTokens(), budgets.data());
}

void BudgetPlanner::AllocateByCost(std::span<const RowDraft> rows, std::span<int32_t> budgets) {
  int64_t num_tokens = 0;
  for (const auto& row : rows) num_tokens += row.length;
  times_.resize(static_cast<size_t>(std::min(num_tokens, next_.token_budget)) + 1);
  GoodputChoice choice = Choose(rows, budgets);
  double plain_ms = times_[0] - running_.draft_ms;
  auto num_rows = static_cast<double>(std::max<int64_t>(1, next_.num_decode_rows));
  double saved_ms = 0;
  if (choice.num_draft_tokens > 0) {
    saved_ms = choice.num_accepted_tokens / num_rows * plain_ms -
               (times_[static_cast<size_t>(choice.num_draft_tokens)] - times_[0]);
    marginal_survival_ = choice.marginal_survival;
    ++num_drafting_;
  } else {
    marginal_survival_ = 1;
    num_drafting_ = 0;
  }
  BackOff(saved_ms > running_.draft_ms);
  if (choice.num_draft_tokens == 0) choice = Probe(rows, budgets);
  BudgetStats& stats = StatsOf(next_.num_decode_rows);
  stats.num_draft_steps += choice.num_draft_tokens > 0;
  stats.num_draft_tokens += choice.num_draft_tokens;
  stats.num_expected_tokens += choice.num_accepted_tokens;
  stats.predicted_saved_ms += saved_ms;
  if (options_.policy == Policy::kShadow) std::fill(budgets.begin(), budgets.end(), 0);
}

GoodputChoice BudgetPlanner::Choose(std::span<const RowDraft> rows, std::span<int32_t> budgets) {
  StepCosts costs{times_, 0, trust(), options_.min_gain, 0};
  auto predict = [&](const NextStep& next) {
    cost_model_.PredictDrafts(ShapeOf(next, 0), times_, &costs.row_ms);
    for (float& time : times_) time += static_cast<float>(running_.draft_ms);
  };
  if (next_.num_prefill_tokens > 0 && times_.size() > 1) {
    // Prompts make a step long, and draft tokens look cheap beside them; but they delay the prompts. So a token is
    // worth what it costs in a step without prompts.
    NextStep decode = next_;
    decode.num_prefill_tokens = 0;
    predict(decode);
    GoodputChoice choice = AllocateByGoodput(rows, next_.num_decode_rows, costs, budgets);
    costs.token_ms = static_cast<float>(
        times_[static_cast<size_t>(choice.num_draft_tokens)] /
        (static_cast<double>(std::max<int64_t>(1, next_.num_decode_rows)) + choice.num_accepted_tokens));
  }
  predict(next_);
  return AllocateByGoodput(rows, next_.num_decode_rows, costs, budgets);
}

GoodputChoice BudgetPlanner::Probe(std::span<const RowDraft> rows, std::span<int32_t> budgets) {
  probe_credit_ = std::min(kMaxProbeCredit, probe_credit_ + kProbeShare);
  size_t size = std::min(times_.size() - 1, kProbeTokens[num_probes_ % kProbeTokens.size()]);
  if (options_.policy == Policy::kShadow || size == 0 || !cost_model_.has_level()) return {};
  auto num_tokens = static_cast<int64_t>(size);
  double cost = std::log(times_[size] / times_[0]);
  double deviation = cost_model_.RatioDeviation(ShapeOf(next_, num_tokens), ShapeOf(next_, 0));
  if (deviation < std::max(kMinProbeDeviation, kProbeDeviation * cost)) {
    ++num_probes_;
    return {};
  }
  std::vector<float> free(size + 1, 1.0f);  // the best ones are taken
  GoodputChoice choice = AllocateByGoodput(rows, next_.num_decode_rows, {free}, budgets);
  double loss = times_[static_cast<size_t>(choice.num_draft_tokens)] / times_[0] - 1 -
                choice.num_accepted_tokens * trust() / static_cast<double>(std::max<int64_t>(1, next_.num_decode_rows));
  if (loss > probe_credit_) {
    std::fill(budgets.begin(), budgets.end(), 0);
    return {};
  }
  probe_credit_ -= std::max(0.0, loss);
  ++num_probes_;
  return choice;
}

void BudgetPlanner::BackOff(bool pays) {
  num_idle_ = pays ? 0 : num_idle_ + 1;
  if (num_idle_ < kIdleSteps || !cost_model_.has_level()) return;
  double affordable_ms = kIdleShare * step_ms_;
  num_steps_to_skip_ = static_cast<int>(std::min<double>(kMaxSkippedSteps, running_.draft_ms / affordable_ms));
}

}  // namespace agentspec
