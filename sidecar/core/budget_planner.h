// Decides each step whether to draft and what to verify, for one engine of the target model: cost model, policy, and
// the brakes that keep it from being slower than plain decoding. The policy apart, all of it is ours (D-023).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "budget.h"
#include "cost_model.h"

namespace agentspec {

struct BudgetOptions {
  Policy policy = Policy::kRedundancy;
  double intensity_limit =
      0;  // M(b) = this - rows - prefill tokens for redundancy and uniform; 0: only the step's limit
  CostPrior prior;
  float min_survival = 0.1f;  // of redundancy, uniform and fixed: draft tokens that would survive with less are cut
  float min_gain = 0.006f;    // goodput verifies nothing that gains less than this share of plain decoding
  double draft_us = -1;       // time to draft one row; < 0: measured
};

// What is known of the step to come.
struct NextStep {
  int64_t num_decode_rows = 0;
  int64_t num_prefill_tokens = 0;
  int64_t num_sampled_rows = 0;
  int64_t num_context_tokens = 0;
  int64_t num_drafting_rows = 0;  // rows with room for a draft
  int64_t token_budget = 0;       // most draft tokens
};

struct BudgetStats {
  int64_t num_steps = 0;
  int64_t num_draft_steps = 0;     // that verified a draft
  int64_t num_skipped_steps = 0;   // without drafting at all, because it did not pay
  int64_t num_draft_tokens = 0;    // admitted; under policy `shadow` they are not verified
  double num_expected_tokens = 0;  // of these, accepted, as survival promises
  int64_t num_accepted_tokens = 0;
  double step_ms = 0;             // measured, of the target model
  double predicted_ms = 0;        // the same as the cost model saw it before
  double draft_ms = 0;            // charged for drafting
  double predicted_saved_ms = 0;  // against plain decoding: D[(1 - r)s - v], as the policy saw it
  double saved_ms = 0;            // the same as it turned out, drafting charged
};

class BudgetPlanner {
 public:
  // 1, 2-8, 9-32, 33-64, 65-128 and more decode rows.
  static constexpr int kNumBuckets = 6;

  explicit BudgetPlanner(const BudgetOptions& options);

  Policy policy() const { return options_.policy; }
  void set_policy(Policy policy) { options_.policy = policy; }

  // The calls of one step, in this order. First what the last one brought: verdicts by row, and its time, where
  // measured.
  void AddVerdict(double num_expected, int64_t num_draft_tokens, int64_t num_accepted_tokens);
  void Finish(const StepShape& shape, double duration_ms);
  // Whether to draft, and below which survival drafts end.
  struct Plan {
    bool is_drafting;
    float min_survival;
  };
  Plan Begin(const NextStep& next);
  // What of the drafts is verified; `draft_us` is how long drafting took.
  void Allocate(std::span<RowDraft> rows, double draft_us, std::span<int32_t> budgets);
  // Steps to come that will not draft.
  int skip_steps() const { return num_steps_to_skip_; }

  const CostModel& cost_model() const { return cost_model_; }
  bool LoadCostModel(std::string_view bytes) { return cost_model_.Load(bytes); }
  const std::array<BudgetStats, kNumBuckets>& stats() const { return stats_; }
  bool is_gate_open() const { return gate_steps_left_ == 0; }
  uint64_t num_gate_closings() const { return num_gate_closings_; }
  float trust() const;

 private:
  // What the last step was expected to bring, until its time and its verdicts come.
  struct Running {
    double draft_ms = 0;
    double num_expected = 0;
    int64_t num_draft_tokens = 0, num_accepted = 0;  // from the verdicts
  };
  bool IsByCost() const { return options_.policy == Policy::kGoodput || options_.policy == Policy::kShadow; }
  StepShape ShapeOf(const NextStep& next, int64_t num_draft_tokens) const;
  void AllocateByRule(std::span<RowDraft> rows, std::span<int32_t> budgets) const;
  void AllocateByCost(std::span<const RowDraft> rows, std::span<int32_t> budgets);
  GoodputChoice Choose(std::span<const RowDraft> rows, std::span<int32_t> budgets);
  bool IsPlainProbeDue();
  GoodputChoice Probe(std::span<const RowDraft> rows, std::span<int32_t> budgets);
  void WatchGate(double advantage);
  void BackOff(bool pays);
  BudgetStats& StatsOf(int64_t num_rows);
  int64_t FreeTokens() const;

  BudgetOptions options_;
  CostModel cost_model_;
  std::array<BudgetStats, kNumBuckets> stats_{};
  NextStep next_;
  Running running_;
  std::vector<float> times_;
  double draft_us_per_row_ = 0;
  // Realised against promised acceptance, fading.
  double promised_ = 0, realised_ = 0;
  // Gain over plain decoding, in shares of a step, over the last drafting steps.
  double gate_mean_ = 0, gate_square_ = 0;
  int gate_count_ = 0, gate_steps_left_ = 0, gate_length_ = 0;
  uint64_t num_gate_closings_ = 0;
  float marginal_survival_ = 0;
  double step_ms_ = 0;  // of the next step, expected
  int num_idle_ = 0;    // steps in a row that drafted for nothing
  int num_steps_to_skip_ = 0;
  int num_drafting_ = 0;  // steps in a row that verified drafts
  int plain_probe_after_ = 8;
  uint64_t num_planned_ = 0, num_probes_ = 0;
  double probe_credit_ = 0.05;  // shares of a step that probing with drafts may still lose
};

}  // namespace agentspec
