#include "cuda/backend/kernel_entry.h"

#include <algorithm>
#include <limits>

#include "cuda/backend/launch/counted_rows.h"
#include "cuda/device/schedule/weight_tiles.h"

namespace moegemm::cuda {
namespace {

/// Extents and tile numbers, and a block's overshoot of the latter, must fit 32 bits.
constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;

/// Output tiles at most, also of segments that overlap.
std::int64_t most_tiles(const KernelEntry& entry, const Problem& problem) {
  if (problem.segments == Segments::kPacked) return entry.tiles(entry.info, problem);
  Problem counted = problem;
  counted.rows = most_counted_rows(problem.segments, problem.rows, problem.experts);
  return entry.tiles(entry.info, counted);
}

}  // namespace

std::vector<const void*> layer_functions(const std::vector<KernelEntry>& kernels) {
  std::vector<const void*> compiled;
  for (const KernelEntry& entry : kernels) {
    compiled.insert(compiled.end(), entry.layer_functions.begin(), entry.layer_functions.end());
  }
  return compiled;
}

std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  if (problem.op != entry.info.op) {
    return std::string("computes ") + to_string(entry.info.op) + " only";
  }
  const int major = entry.arch / 10;
  if (facts.major < major || (entry.exact && facts.major > major)) {
    return "is compiled for compute capability " + std::to_string(major) + ".0 " +
           (entry.exact ? "only" : "and newer");
  }
  if (std::string reason = refuse_weights(problem, entry.info); !reason.empty()) return reason;
  return entry.refuse(entry, problem, facts);
}

std::string refuse_size(const KernelEntry& entry, const Problem& problem,
                        const DeviceFacts& facts) {
  if (problem.rows > kMost || problem.slots > kMost || problem.n > kMost || problem.k > kMost ||
      problem.experts > kMost) {
    return "M, N, K and E must be below 2^30";
  }
  if (most_tiles(entry, problem) > kMost) return "more than 2^30 output tiles";
  const std::int64_t smem = entry.smem_bytes(problem);
  if (smem > facts.shared_memory_bytes) {
    return std::to_string(problem.experts) + " experts need " + std::to_string(smem) +
           " bytes of shared memory, a block has " + std::to_string(facts.shared_memory_bytes);
  }
  return {};
}

std::int64_t most_row_tiles(const KernelInfo& info, const Problem& problem) {
  const std::int64_t columns = problem.op == Op::kForward ? problem.n : problem.k;
  const std::int64_t row_tiles =
      std::min(problem.experts, problem.rows) + problem.rows / info.tile.rows;
  return row_tiles * ((columns + info.tile.columns - 1) / info.tile.columns);
}

int resident_blocks(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  constexpr std::int64_t kReserved = 1024;  // shared memory that the system takes for each block
  const std::int64_t smem = entry.smem_bytes(problem) + kReserved;
  return static_cast<int>(std::clamp<std::int64_t>(facts.multiprocessor_shared_memory_bytes / smem,
                                                   1, entry.blocks_per_multiprocessor));
}

int persistent_grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const int most = facts.multiprocessors * resident_blocks(entry, problem, facts);
  return static_cast<int>(std::clamp<std::int64_t>(entry.tiles(entry.info, problem), 1, most));
}

LaunchPolicy weight_launch_policy(const KernelEntry& entry, const Problem& problem,
                                  const DeviceFacts& facts) {
  const std::int64_t rows = problem.planned_rows() / std::max<std::int64_t>(problem.experts, 1);
  const bool along_k =
      k_tiles_first(rows, problem.n, problem.k, size_bytes(problem.dtype), facts.l2_bytes);
  return {.grid = persistent_grid(entry, problem, facts),
          .order = along_k ? TileOrder::kAlongColumns : TileOrder::kAlongRows};
}

void launch_prepared(const KernelEntry& entry, const Step& step, const Problem& problem,
                     void* params, cudaStream_t stream) {
  const LaunchSpec spec = {.function = entry.function(problem),
                           .name = entry.info.name.c_str(),
                           .grid = dim3(static_cast<unsigned>(step.grid)),
                           .block = dim3(static_cast<unsigned>(entry.threads)),
                           .dynamic_smem_bytes = static_cast<int>(step.smem_bytes),
                           .early = step.start != LaunchStart::kAfter,
                           .device = problem.device.index};
  launch(spec, &params, stream, step);
}

}  // namespace moegemm::cuda
