#include "cuda/sm80/heuristic.h"

#include <algorithm>

#include "cuda/sm80/stream_gemm/traits.h"

namespace moegemm::cuda::sm80 {
namespace {

/// Tiles of this many rows and fewer stream weights: nothing else limits them.
int decode_rows(const Problem& problem) { return problem.quantization.plain() ? 32 : 16; }

/// Average of the experts in use.
double rows_per_expert(const Problem& problem) {
  const double experts =
      std::max<double>(1, std::min<double>(problem.experts, problem.planned_rows()));
  return static_cast<double>(problem.planned_rows()) / experts;
}

/// What kernels that decode W reach of the plain kernels' speed with many rows for each expert, and
/// the rows whose plain product takes as long as dequantising, on an H200.
struct Decoding {
  double forward;
  double dx;
  double pass_rows;
};

Decoding decoding_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kMxfp4:
      return {0.735, 0.755, 125};
    case WeightFormat::kInt4:
      return {0.695, 0.775, 125};
    case WeightFormat::kNf4:
      return {0.595, 0.65, 125};
    default:
      return {0.54, 0.575, 145};
  }
}

}  // namespace

bool streams_weights(const KernelInfo& kernel) {
  return kernel.weights != WeightFormat::kPlain && kernel.tile.columns == kStreamFeatures;
}

bool streaming_is_faster(const Problem& problem) {
  // Microseconds on an H200, mxfp4, and of the best other kernel: Qwen3-30B fwd1 with 16 rows for
  // each expert 147 (174), with 24 about 200 (176); gpt-oss-120b fwd1 with 16 rows 648 (859).
  constexpr double kMostRows = 16;
  constexpr double kMostElements =
      50000;  // of an expert's rows: a block has room for about so many
  const double rows = rows_per_expert(problem);
  return problem.op == Op::kForward && rows <= kMostRows &&
         rows * static_cast<double>(problem.k) <= kMostElements;
}

int choose_streaming(std::span<const KernelEntry* const> feasible, const Problem& problem) {
  // Kernels of more warps have less room for rows: 288 (300) microseconds for gpt-oss-120b fwd1
  // with 2.4 rows for each expert, 485 (417) with 8; Qwen3-30B 83 (86) with 4, 127 (99) with 8.
  constexpr double kFewElements = 14000;
  const bool few = rows_per_expert(problem) * static_cast<double>(problem.k) <= kFewElements;
  int chosen = -1;
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    if (!streams_weights(feasible[i]->info)) continue;
    const bool better = chosen < 0 || (!few && feasible[i]->threads < feasible[chosen]->threads &&
                                       feasible[i]->arch == feasible[chosen]->arch);
    if (better) chosen = static_cast<int>(i);
  }
  return chosen;
}

int preference_rank(const KernelEntry& kernel, const Problem& problem, const DeviceFacts& facts) {
  // Loading elements one by one is for what vectors cannot do.
  if (kernel.any_alignment) return 6;
  // Warps that only copy, and large tiles, are fastest wherever they are compiled. Else two blocks
  // hide each other's stores and barriers; which kernels fit twice depends on the GPU.
  const bool alone =
      resident_blocks(kernel, problem, facts) < std::min(kernel.blocks_per_multiprocessor, 2);
  const int way = kernel.copies_apart ? 0 : (alone ? 2 : 1);
  if (problem.op == Op::kDw) return way;
  if (streams_weights(kernel.info)) return 6;  // choose_streaming
  const double rows = rows_per_expert(problem);
  const int decode = decode_rows(problem);
  const bool few_rows = rows <= 0.75 * decode;
  return (few_rows == (kernel.info.tile.rows <= decode) ? 0 : 3) + way;
}

bool aligning_first_is_faster(const Problem& problem) {
  // Loading elements one by one multiplies at a sixth of the speed. What copying W (of dW: storing
  // it twice) takes is 40 rows' worth of that for each expert; the rest is for the rows themselves.
  constexpr std::int64_t kLeastRows = 48;
  return problem.planned_rows() >= kLeastRows * problem.experts;
}

bool dequantising_first_is_faster(const Problem& problem) {
  // Whoever keeps W packed is short of memory.
  constexpr double kMostBytes = 4.0 * (1 << 30);
  const Decoding decoding = decoding_of(problem.quantization.format);
  const double share = problem.op == Op::kForward ? decoding.forward : decoding.dx;
  const double bytes = static_cast<double>(problem.experts) * static_cast<double>(problem.n) *
                       static_cast<double>(problem.k) * size_bytes(problem.dtype);
  return bytes <= kMostBytes && rows_per_expert(problem) * (1 / share - 1) > decoding.pass_rows;
}

int choose_among(std::span<const KernelEntry* const> feasible, const Problem& problem,
                 const DeviceFacts& facts) {
  if (!problem.quantization.plain() && streaming_is_faster(problem)) {
    if (const int streaming = choose_streaming(feasible, problem); streaming >= 0) return streaming;
  }
  int best = 0;
  int best_rank = preference_rank(*feasible[0], problem, facts);
  for (std::size_t i = 1; i < feasible.size(); ++i) {
    const int rank = preference_rank(*feasible[i], problem, facts);
    if (rank < best_rank) {
      best = static_cast<int>(i);
      best_rank = rank;
    }
  }
  return best;
}

}  // namespace moegemm::cuda::sm80
