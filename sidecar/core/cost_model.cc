#include "cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "archive.h"

namespace agentspec {

namespace {

constexpr double kKnots[] = {1,   2,   4,   8,   12,  16,  20,  24,  28,  32,  40,  48,   56,   64,   80,   96,  112,
                             128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 4096, 8192};
constexpr double kMaxDurationMs = 60'000;  // a step that took longer measured something else
constexpr double kMinShape = 0.2;          // of the shortest step: no combination of weights goes below
constexpr double kStartNoise = 0.06, kMinNoise = 0.004, kMaxNoise = 0.5;  // relative, of one step
constexpr double kLevelGain = 0.067;     // share of a surprise that moves the level: half-life 10 steps
constexpr double kMemorySteps = 20'000;  // after so many steps a weight is as uncertain as at the start
constexpr double kNoiseGain = 0.03;      // the same for the noise
constexpr double kOutlier = 3;           // standard deviations; more is cut off
constexpr int kShiftSteps = 4;           // so many outliers on one side: the level has moved
constexpr double kShiftVariance = 0.1 * 0.1;
constexpr double kUnknownLevel = 100;
constexpr char kMagic[] = "ASCM1";

}  // namespace

CostModel::CostModel(CostPrior prior) : prior_(std::move(prior)), noise_variance_(kStartNoise * kStartNoise) {
  int num_knots = 0;
  for (double knot : kKnots) {  // the bend is one of them, so that the curve is straight in between
    if (std::abs(knot / prior_.intensity - 1) < 0.05) continue;
    if (num_knots > 0 && knots_[num_knots - 1] < prior_.intensity && prior_.intensity < knot)
      knots_[num_knots++] = prior_.intensity;
    knots_[num_knots++] = knot;
  }
  num_stretches_ = num_knots - 1;
  num_weights_ = 2 + num_stretches_ + kNumExtras;
  weights_.fill(0);
  weights_[0] = 1;
  weights_[1] = prior_.slope;
  auto deviation = [&](int weight, double value) { prior_variance_[weight] = value * value; };
  deviation(0, 0.5);
  deviation(1, 0.3);
  for (int i = 0; i < num_stretches_; ++i) {
    double share = (knots_[i + 1] - knots_[i]) / prior_.intensity;
    deviation(2 + i, 0.01 + 0.5 * std::min(share, 1.0) + 0.1 * share);
  }
  for (auto [extra, value] : {std::pair{kAnyDraft, 0.05},
                              {kAnyDraftPerRow, 0.2},
                              {kDraftRow, 0.2},
                              {kDraftToken, 0.4},
                              {kPrefillToken, 0.5},
                              {kSampledRow, 0.3},
                              {kSampledDraft, 0.5},
                              {kContext, 0.5}})
    deviation(FirstExtra() + extra, value);
  int size = num_weights_ + 1;
  covariance_.assign(size_t(size) * size, 0);
  for (int i = 0; i < num_weights_; ++i) covariance_[size_t(i) * size + i] = prior_variance_[i];
  covariance_.back() = kUnknownLevel;
}

double CostModel::Padded(double num_tokens) const {
  auto size = std::lower_bound(prior_.capture_sizes.begin(), prior_.capture_sizes.end(), num_tokens);
  return size == prior_.capture_sizes.end() ? num_tokens : *size;
}

CostModel::Features CostModel::FeaturesOf(const StepShape& shape) const {
  Features features{};
  auto rows = static_cast<double>(shape.num_decode_rows), drafts = static_cast<double>(shape.num_draft_tokens);
  double tokens = Padded(rows + drafts + static_cast<double>(shape.num_prefill_tokens));
  double unit = 1 / prior_.intensity;
  features[0] = std::max(0.0, tokens - prior_.intensity) * unit;
  features[1] = tokens * unit;
  for (int i = 0; i < num_stretches_ && tokens > knots_[i]; ++i)
    features[2 + i] = std::min(1.0, (tokens - knots_[i]) / (knots_[i + 1] - knots_[i]));
  double* extra = features.data() + FirstExtra();
  extra[kAnyDraft] = drafts > 0;
  extra[kAnyDraftPerRow] = drafts > 0 ? rows * unit : 0;
  extra[kDraftRow] = static_cast<double>(shape.num_draft_rows) * unit;
  extra[kDraftToken] = drafts * unit;
  extra[kPrefillToken] = static_cast<double>(shape.num_prefill_tokens) * unit;
  extra[kSampledRow] = static_cast<double>(shape.num_sampled_rows) * unit;
  extra[kSampledDraft] = rows > 0 ? drafts * static_cast<double>(shape.num_sampled_rows) / rows * unit : 0;
  extra[kContext] = static_cast<double>(shape.num_context_tokens) * 1e-5;
  return features;
}

double CostModel::Shape(const Features& features) const {
  double shape = 1;
  for (int i = 0; i < num_weights_; ++i) shape += weights_[i] * features[i];
  return std::max(kMinShape, shape);
}

bool CostModel::Observe(const StepShape& shape, double duration_ms) {
  bool is_empty = shape.num_decode_rows + shape.num_prefill_tokens <= 0;
  if (is_empty || !(duration_ms > 0) || duration_ms > kMaxDurationMs) {
    ++num_skipped_;
    return false;
  }
  int size = num_weights_ + 1;
  Features features = FeaturesOf(shape);
  double value = Shape(features);
  std::array<double, kMaxState> gradient, spread;
  for (int i = 0; i < num_weights_; ++i) gradient[i] = features[i] / value;
  gradient[num_weights_] = 1;
  double known = 0;
  for (int i = 0; i < size; ++i) {
    const double* row = covariance_.data() + size_t(i) * size;
    double sum = 0;
    for (int j = 0; j < size; ++j) sum += row[j] * gradient[j];
    spread[i] = sum;
    known += sum * gradient[i];
  }
  double surprise = std::log(duration_ms) - log_level_ - std::log(value);
  double variance = known + noise_variance_;
  double limit = kOutlier * std::sqrt(variance);
  is_surprised_ = std::abs(surprise) > limit;
  num_shifts_ = !is_surprised_ ? 0 : surprise > 0 ? std::max(0, num_shifts_) + 1 : std::min(0, num_shifts_) - 1;
  surprise = std::clamp(surprise, -limit, limit);
  double gain = surprise / variance;
  for (int i = 0; i < num_weights_; ++i) weights_[i] += gain * spread[i];
  log_level_ += gain * spread[num_weights_];
  for (int i = 0; i < size; ++i) {
    double* row = covariance_.data() + size_t(i) * size;
    double scale = spread[i] / variance;
    for (int j = 0; j < size; ++j) row[j] -= scale * spread[j];
  }
  if (num_observed_ > 0)  // the first step only sets the level
    noise_variance_ +=
        kNoiseGain *
        (std::clamp(surprise * surprise - known, 0.0, kOutlier * kOutlier * noise_variance_) - noise_variance_);
  noise_variance_ = std::clamp(noise_variance_, kMinNoise * kMinNoise, kMaxNoise * kMaxNoise);
  for (int i = 0; i < num_weights_; ++i) {
    double& own = covariance_[size_t(i) * size + i];
    if (own < prior_variance_[i]) own += prior_variance_[i] / kMemorySteps;
  }
  covariance_.back() += noise_variance_ * kLevelGain * kLevelGain / (1 - kLevelGain);
  if (std::abs(num_shifts_) >= kShiftSteps) {
    covariance_.back() += kShiftVariance;
    num_shifts_ = 0;
  }
  ++num_observed_;
  return true;
}

double CostModel::Predict(const StepShape& shape) const { return std::exp(log_level_) * Shape(FeaturesOf(shape)); }

double CostModel::CurveAt(double tokens) const {
  double unit = 1 / prior_.intensity;
  double value = weights_[0] * std::max(0.0, tokens - prior_.intensity) * unit + weights_[1] * tokens * unit;
  for (int i = 0; i < num_stretches_ && tokens > knots_[i]; ++i)
    value += weights_[2 + i] * std::min(1.0, (tokens - knots_[i]) / (knots_[i + 1] - knots_[i]));
  return value;
}

void CostModel::PredictDrafts(const StepShape& shape, std::span<float> times, float* row_ms) const {
  double level = std::exp(log_level_), unit = 1 / prior_.intensity;
  auto rows = static_cast<double>(shape.num_decode_rows);
  double others = rows + static_cast<double>(shape.num_prefill_tokens);
  StepShape plain = shape;
  plain.num_draft_tokens = plain.num_draft_rows = 0;
  double base = Shape(FeaturesOf(plain)) - CurveAt(Padded(others));
  const double* extra = weights_.data() + FirstExtra();
  double any = extra[kAnyDraft] + extra[kAnyDraftPerRow] * rows * unit;
  double sampled = rows > 0 ? static_cast<double>(shape.num_sampled_rows) / rows : 0;
  double each = (extra[kDraftToken] + extra[kSampledDraft] * sampled) * unit;
  *row_ms = static_cast<float>(std::max(0.0, extra[kDraftRow] * unit * level));
  std::array<double, kMaxKnots> curve, slope;  // at each knot, and from there on
  for (int i = 0; i <= num_stretches_; ++i) curve[i] = CurveAt(knots_[i]);
  for (int i = 0; i < num_stretches_; ++i) slope[i] = (curve[i + 1] - curve[i]) / (knots_[i + 1] - knots_[i]);
  slope[num_stretches_] = (weights_[0] + weights_[1]) * unit;
  int knot = 0;
  double highest = kMinShape;
  for (size_t drafts = 0; drafts < times.size(); ++drafts) {
    double tokens = Padded(others + static_cast<double>(drafts));
    while (knot < num_stretches_ && tokens > knots_[knot + 1]) ++knot;
    double value = curve[knot] + slope[knot] * (tokens - knots_[knot]) + each * static_cast<double>(drafts);
    highest = std::max(highest, base + value + (drafts > 0 ? any : 0));
    times[drafts] = static_cast<float>(highest * level);
  }
}

double CostModel::RatioDeviation(const StepShape& a, const StepShape& b) const {
  Features features_a = FeaturesOf(a), features_b = FeaturesOf(b);
  double value_a = Shape(features_a), value_b = Shape(features_b);
  std::array<double, kMaxWeights> difference;
  for (int i = 0; i < num_weights_; ++i) difference[i] = features_a[i] / value_a - features_b[i] / value_b;
  double variance = 0;
  for (int i = 0; i < num_weights_; ++i) {
    const double* row = covariance_.data() + size_t(i) * size_t(num_weights_ + 1);
    double sum = 0;
    for (int j = 0; j < num_weights_; ++j) sum += row[j] * difference[j];
    variance += sum * difference[i];
  }
  return std::sqrt(std::max(0.0, variance));
}

double CostModel::level_ms() const { return has_level() ? std::exp(log_level_) : 0; }

double CostModel::noise() const { return std::sqrt(noise_variance_); }

std::string CostModel::Save() const {
  std::string bytes(kMagic, sizeof kMagic);
  auto put = [&](const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); };
  put(&prior_.intensity, sizeof prior_.intensity);
  put(weights_.data(), sizeof(double) * size_t(num_weights_));
  put(&log_level_, sizeof log_level_);
  put(&noise_variance_, sizeof noise_variance_);
  put(&num_observed_, sizeof num_observed_);
  put(covariance_.data(), sizeof(double) * covariance_.size());
  uint64_t sum = Checksum(bytes);
  put(&sum, sizeof sum);
  return bytes;
}

bool CostModel::Load(std::string_view bytes) {
  uint64_t sum;
  size_t expected = sizeof kMagic + sizeof(double) * (3 + size_t(num_weights_) + covariance_.size()) +
                    sizeof num_observed_ + sizeof sum;
  if (bytes.size() != expected || !bytes.starts_with(std::string_view(kMagic, sizeof kMagic))) return false;
  std::memcpy(&sum, bytes.data() + bytes.size() - sizeof sum, sizeof sum);
  if (Checksum(bytes.substr(0, bytes.size() - sizeof sum)) != sum) return false;
  const char* next = bytes.data() + sizeof kMagic;
  auto take = [&](void* data, size_t size) {
    std::memcpy(data, next, size);
    next += size;
  };
  double intensity;
  take(&intensity, sizeof intensity);
  if (intensity != prior_.intensity) return false;
  take(weights_.data(), sizeof(double) * size_t(num_weights_));
  take(&log_level_, sizeof log_level_);
  take(&noise_variance_, sizeof noise_variance_);
  take(&num_observed_, sizeof num_observed_);
  take(covariance_.data(), sizeof(double) * covariance_.size());
  covariance_.back() += kUnknownLevel;
  return true;
}

}  // namespace agentspec
