#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace moegemm::cuda {

/// How `route` splits the work. Depends on nothing but its two arguments, so that the workspace can
/// be sized without a device.
struct RoutePlan {
  std::int64_t buckets = 0;      ///< one per expert, and a last one for ids that name no expert
  std::int64_t blocks = 1;       ///< thread blocks; block b owns rows [b, b + 1) * chunk_rows
  std::int64_t chunk_rows = 0;   ///< the last block may own fewer
  int ranking_warps = 0;         ///< warps of a block that own runs of its chunk
  bool in_shared_memory = true;  ///< counters of a block fit; else they are in the workspace
  bool few = false;              ///< every row finds its own position, unless rows are compact

  /// 32-bit counters of one block in the placing kernel: for each bucket its total, the rows of it
  /// in earlier blocks, and one for each ranking warp.
  std::int64_t counters_per_block() const { return (ranking_warps + 2) * buckets; }
  /// Bucket counts of each block, if blocks have to tell each other.
  std::int64_t shared_counts() const { return blocks > 1 ? blocks * buckets : 0; }
  std::int64_t workspace_bytes() const {
    return 4 * (shared_counts() + (in_shared_memory ? 0 : blocks * counters_per_block()));
  }
};

constexpr int kRouteThreads = 1024;
constexpr int kRouteWarps = kRouteThreads / 32;
/// Every GPU from sm_80 up gives a block 99 KiB (some 163 or 227).
constexpr std::int64_t kRouteSharedBytes = 96 * 1024;
/// Rows that one block sorts in the time of two launches: on an H200, 512 rows take 3.5 us in one
/// block and 4096 rows 8.4; 8192 rows in two launches 7.2.
constexpr std::int64_t kRouteOneBlockRows = 3072;
/// The GPU's multiprocessors, about; more blocks only mean more counts to add up.
constexpr std::int64_t kRouteMaxBlocks = 128;

/// Rows, and experts, that are compared with all rows in less time than a scan takes.
constexpr std::int64_t kRouteFewRows = 128;
constexpr std::int64_t kRouteFewExperts = 1024;
constexpr int kRouteFewThreads = 256;

inline RoutePlan plan_route(std::int64_t rows, std::int64_t experts) {
  RoutePlan plan;
  plan.buckets = experts + 1;
  plan.few = rows <= kRouteFewRows && experts <= kRouteFewExperts;
  const std::int64_t fitting_warps = kRouteSharedBytes / 4 / plan.buckets - 2;
  // Below 4 warps a block is slower in shared memory than with all of them on the L2 cache.
  plan.in_shared_memory = fitting_warps >= 4;
  plan.ranking_warps = plan.in_shared_memory
                           ? static_cast<int>(std::min<std::int64_t>(fitting_warps, kRouteWarps))
                           : 8;
  if (rows <= kRouteOneBlockRows) {
    // No more warps than have rows: each one's counters have to be cleared and scanned.
    const std::int64_t useful = std::max<std::int64_t>((rows + 31) / 32, 1);
    plan.ranking_warps = static_cast<int>(std::min<std::int64_t>(plan.ranking_warps, useful));
    const std::int64_t step = 32 * plan.ranking_warps;
    plan.chunk_rows = std::max<std::int64_t>((rows + step - 1) / step, 1) * step;
    return plan;
  }
  const std::int64_t step = 32 * plan.ranking_warps;  // a chunk is 32 rows, n times, for each warp
  // Every block adds up blocks * buckets counts and ranks rows / blocks rows; a row costs about six
  // times a count, so their sum is least at this many blocks.
  const double balanced =
      std::sqrt(6.0 * static_cast<double>(rows) / static_cast<double>(plan.buckets));
  const double wanted = std::clamp(balanced, 1.0, static_cast<double>(kRouteMaxBlocks));
  const auto steps = std::llround(static_cast<double>(rows) / wanted / static_cast<double>(step));
  plan.chunk_rows = std::max<std::int64_t>(steps, 1) * step;
  plan.blocks = (rows + plan.chunk_rows - 1) / plan.chunk_rows;
  return plan;
}

}  // namespace moegemm::cuda
