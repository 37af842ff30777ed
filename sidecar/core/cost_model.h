// How long a verification step takes: a shape that is learned slowly and one level that follows fast.
//
// log T = log level + log shape(step). The shape is linear in features of the step: a curve over its tokens (global
// slope and bend, and a local correction between knots) and what else costs time. Level and weights are one Kalman
// filter: while steps look alike a surprise moves the level, which drifts by itself; when the make-up of steps changes
// a surprise falls on the weights that tell them apart. The prior is a roofline. Ours, D-023.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace agentspec {

// What one step of the target model is made of; see StepTiming in engine.py.
struct StepShape {
  int64_t num_decode_rows = 0;
  int64_t num_draft_tokens = 0;
  int64_t num_draft_rows = 0;
  int64_t num_prefill_tokens = 0;
  int64_t num_sampled_rows = 0;
  int64_t num_context_tokens = 0;
};

struct CostPrior {
  double intensity = 206;              // tokens from which on computing takes longer than reading the weights
  double slope = 0.1;                  // how much longer a step of that many tokens takes than one of one token
  std::vector<int32_t> capture_sizes;  // rising; a step of fewer tokens takes as long as the next size
};

class CostModel {
 public:
  explicit CostModel(CostPrior prior);

  // Learns from one step. False, nothing changed: no rows or tokens, or a duration that can't be (clocks jump).
  bool Observe(const StepShape& shape, double duration_ms);

  // Time of a step, ms; before the first observation in units of the shortest step.
  double Predict(const StepShape& shape) const;
  // Times of `shape` with 0, 1, ... draft tokens; never falls. `row_ms` is what each row that drafts adds.
  void PredictDrafts(const StepShape& shape, std::span<float> times, float* row_ms) const;
  // Standard deviation of log(T(a) / T(b)): how little is known of what tells the two apart.
  double RatioDeviation(const StepShape& a, const StepShape& b) const;

  bool has_level() const { return num_observed_ > 0; }
  uint64_t num_observed() const { return num_observed_; }
  uint64_t num_skipped() const { return num_skipped_; }
  // Whether the last step took a time that the model held for all but impossible.
  bool is_surprised() const { return is_surprised_; }
  // Time of the shortest step, ms; 0: nothing was measured yet.
  double level_ms() const;
  // Typical surprise of one step, relative.
  double noise() const;

  // The learned state; `Load` of bytes that are cut, changed or of another prior is false and changes nothing. The
  // level counts as unknown after it: another process, another day.
  std::string Save() const;
  bool Load(std::string_view bytes);

 private:
  // Weights of the shape, in this order: bend, slope, one for each stretch between knots, then the costs below.
  enum Extra {
    kAnyDraft,
    kAnyDraftPerRow,
    kDraftRow,
    kDraftToken,
    kPrefillToken,
    kSampledRow,
    kSampledDraft,
    kContext
  };
  static constexpr int kNumExtras = 8;
  static constexpr int kMaxKnots = 40;
  static constexpr int kMaxWeights = 2 + kMaxKnots + kNumExtras;
  static constexpr int kMaxState = kMaxWeights + 1;  // the log of the level is the last

  using Features = std::array<double, kMaxWeights>;
  Features FeaturesOf(const StepShape& shape) const;
  double Shape(const Features& features) const;
  double CurveAt(double num_tokens) const;
  double Padded(double num_tokens) const;
  int FirstExtra() const { return 2 + num_stretches_; }

  CostPrior prior_;
  std::array<double, kMaxKnots> knots_;
  int num_stretches_;  // one less than knots
  int num_weights_;
  std::array<double, kMaxWeights> weights_, prior_variance_;
  double log_level_ = 0;
  std::vector<double> covariance_;  // of weights and log level, row by row
  double noise_variance_;
  int num_shifts_ = 0;  // large surprises of the same sign in a row; negative: downwards
  bool is_surprised_ = false;
  uint64_t num_observed_ = 0, num_skipped_ = 0;
};

}  // namespace agentspec
