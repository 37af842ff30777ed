#include "calibration.h"

#include <cstddef>

namespace agentspec {

namespace {

// Number of edges that `value` exceeds.
template <typename T, size_t n>
int Bucket(T value, const std::array<T, n>& edges) {
  int bucket = 0;
  for (T edge : edges) bucket += value > edge;  // no branch to guess
  return bucket;
}

constexpr std::array<int, 7> kMatchEdges = {1, 2, 3, 5, 8, 14, 24};
constexpr std::array<int, 4> kSupportEdges = {1, 2, 4, 8};
constexpr std::array<float, 4> kConsensusEdges = {0.4f, 0.6f, 0.8f, 0.97f};
constexpr std::array<float, 15> kSurvivalEdges = {0.02f, 0.04f, 0.07f, 0.1f, 0.15f, 0.2f,  0.3f, 0.4f,
                                                  0.5f,  0.6f,  0.7f,  0.8f, 0.9f,  0.95f, 0.98f};
constexpr std::array<int, 6> kDepthEdges = {0, 1, 2, 4, 7, 15};

}  // namespace

const std::array<float, Calibration::kNumTokenCells + Calibration::kNumSurvivalCells> Calibration::kPriorShares = {
#include "calibration_prior.inc"
};

std::vector<Calibration::Count> Calibration::Counts() const {
  std::vector<Count> counts(tokens_.begin(), tokens_.end());
  counts.insert(counts.end(), survival_.begin(), survival_.end());
  return counts;
}

Calibration::Cell Calibration::CellOf(const Evidence& evidence) {
  int cell = evidence.is_own + 2 * evidence.is_shared - 1;
  cell = cell * kDepths + (evidence.depth > 0);
  cell = cell * kMatches + Bucket(evidence.match_length, kMatchEdges);
  cell = cell * kSupports + Bucket(evidence.support, kSupportEdges);
  cell = cell * kConsensus + Bucket(evidence.consensus, kConsensusEdges);
  return static_cast<Cell>(cell);
}

int Calibration::SurvivalCell(float predicted, int depth) {
  return Bucket(predicted, kSurvivalEdges) * kSurvivalDepths + Bucket(depth, kDepthEdges);
}

}  // namespace agentspec
