#include <algorithm>

#include "core/planning/passes.h"
#include "cuda/sm90/heuristic.h"

namespace moegemm::cuda::sm90 {
namespace {

/// What products with weights decoded on the way take beyond those with plain weights, as a share
/// of these, with many rows for each expert; on an H200, Qwen3-30B and Mixtral sizes.
struct Decoding {
  double forward;
  double dx;
  double gathered_forward;
  double gathered_dx;
  double pass_rows;  ///< whose plain product takes as long as dequantising
};

Decoding decoding_of(const Quantization& weights) {
  switch (weights.format) {
    case WeightFormat::kMxfp4:
      return {-0.03, -0.03, 0.24, 0.20, 215};
    case WeightFormat::kInt4:
      return {0.09, 0.31, 0.33, 0.40, 220};
    case WeightFormat::kNf4:
      return {0.22, 0.38, 0.35, 0.52, 220};
    default:  // fp8; a scale for each row costs dX more than one for a block
      return {0.03, weights.block_n == 1 ? 0.12 : 0.04, 0.29, weights.block_n == 1 ? 0.32 : 0.28,
              245};
  }
}

/// What storing a tile costs beyond what hides, in steps of the contraction: results in order leave
/// while the next tile is multiplied.
constexpr double kStoreInOrder = 300;
constexpr double kStoreScattered = 430;

/// Whether decoded weights, of which a workspace holds all or a cut, take more than whoever keeps W
/// packed has to spare: those with a low-rank part beside them are never cut.
bool decoded_weights_are_too_large(const Problem& problem) {
  constexpr double kMostBytes = 4.0 * (1 << 30);
  const std::int64_t depth = problem.op == Op::kForward ? problem.k : problem.n;
  return static_cast<double>(problem.experts) * static_cast<double>(depth) *
             static_cast<double>(features_at_a_time(problem)) * size_bytes(problem.dtype) >
         kMostBytes;
}

}  // namespace

bool dequantising_first_is_faster(const Problem& problem) {
  if (decoded_weights_are_too_large(problem)) return false;
  const bool forward = problem.op == Op::kForward;
  const Decoding decoding = decoding_of(problem.quantization);
  const auto depth =
      static_cast<double>(std::max<std::int64_t>(forward ? problem.k : problem.n, 1));
  double excess = forward ? decoding.forward : decoding.dx;
  if (problem.gathers()) {
    excess = forward ? decoding.gathered_forward : decoding.gathered_dx;
  } else if (!problem.scatters()) {
    excess += kStoreInOrder / depth;
  }
  if (problem.scatters()) excess += kStoreScattered / depth;
  const double experts =
      std::max<double>(1, std::min<double>(problem.experts, problem.planned_rows()));
  return static_cast<double>(problem.planned_rows()) / experts * excess > decoding.pass_rows;
}

}  // namespace moegemm::cuda::sm90
