#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/sm90/heuristic.h"

namespace moegemm::cuda::sm90 {
namespace {

constexpr int kNarrowFeatures = 64;
constexpr int kNarrowRows = 16;
constexpr int kFeatures = 128;
/// Sizes scatter: of a higher average some would need two tiles of 16 rows.
constexpr std::int64_t kRowsPerExpert = 8;
/// Of shorter contractions what a tile costs besides its weights counts too: with narrow tiles
/// Qwen3-Next's second product (512) took 1 us more at one token.
constexpr std::int64_t kLeastDepth = 1024;
/// Of more waves than this the last one hardly counts, and which experts are in use is chance.
constexpr std::int64_t kMostWaves = 4;
/// The part of all multiprocessors that streams as fast as memory is; fewer stream as fast as they
/// can (an H200: 50 of 4300 GB/s each).
constexpr double kSaturating = 0.65;
/// Narrow tiles read rows twice as often: less is no reason.
constexpr double kGain = 1.05;

std::int64_t tiles_of(const Problem& problem, std::int64_t features) {
  const std::int64_t experts = std::min(problem.experts, problem.planned_rows());
  return (problem.n + features - 1) / features * experts;
}

/// How long weights are streamed in tiles of `features`, in columns of an expert: whole waves at
/// the memory's speed, a last one of few tiles at that of their multiprocessors.
double streaming_time(const Problem& problem, std::int64_t features, int multiprocessors) {
  const std::int64_t tiles = tiles_of(problem, features);
  const std::int64_t last = tiles % multiprocessors;
  const double last_counts =
      last == 0 ? 0 : std::max(static_cast<double>(last), kSaturating * multiprocessors);
  return (static_cast<double>(tiles - last) + last_counts) *
         static_cast<double>(std::min(features, problem.n));
}

bool narrow_tiles_balance(const Problem& problem, int multiprocessors) {
  if (problem.op != Op::kForward || multiprocessors < 1) return false;
  if (problem.planned_rows() > kRowsPerExpert * problem.experts) return false;
  if (problem.k < kLeastDepth) return false;
  if (tiles_of(problem, kFeatures) > kMostWaves * multiprocessors) return false;
  return kGain * streaming_time(problem, kNarrowFeatures, multiprocessors) <
         streaming_time(problem, kFeatures, multiprocessors);
}

}  // namespace

int choose_narrow(std::span<const KernelEntry* const> feasible, const Problem& problem,
                  const DeviceFacts& facts) {
  if (!narrow_tiles_balance(problem, facts.multiprocessors)) return -1;
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    const TileShape& tile = feasible[i]->info.tile;
    if (tile.columns == kNarrowFeatures && tile.rows == kNarrowRows) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace moegemm::cuda::sm90
