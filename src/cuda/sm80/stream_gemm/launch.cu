#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/backend/launch/empty_output.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/stream_gemm/params.h"

namespace moegemm::cuda::sm80 {
namespace {

std::int64_t column_tiles(const Problem& problem) {
  return (problem.n + kStreamFeatures - 1) / kStreamFeatures;
}

/// What KernelEntry::smem_bytes is without the rows that a block holds.
std::int64_t fixed_bytes(const KernelEntry& entry, const Problem& problem) {
  return entry.smem_bytes(problem) - kLeastStreamRows * stream_row_pitch(problem.k);
}

/// Rows that a block has room for.
std::int64_t row_slots(const KernelEntry& entry, const Problem& problem, std::int64_t smem_bytes) {
  return std::clamp<std::int64_t>(
      (smem_bytes - fixed_bytes(entry, problem)) / stream_row_pitch(problem.k), kLeastStreamRows,
      kMostStreamRows);
}

/// Rows of an expert are cut into tiles in steps of this.
int granule_of(std::int64_t slots) { return static_cast<int>(std::min<std::int64_t>(slots, 8)); }

/// Of a tile, at most.
int tile_rows(const KernelEntry& entry, std::int64_t slots) {
  const int granule = granule_of(slots);
  return std::min(entry.info.tile.rows, static_cast<int>(slots) / granule * granule);
}

bool has_too_many_tiles(const KernelEntry& entry, const Problem& problem,
                        const DeviceFacts& facts) {
  constexpr std::int64_t kMost = 1 << 30;
  const int most_rows = tile_rows(entry, row_slots(entry, problem, facts.shared_memory_bytes));
  const std::int64_t rows = most_counted_rows(problem.segments, problem.rows, problem.experts);
  return (rows / most_rows + problem.experts) * column_tiles(problem) > kMost;
}

std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const Quantization& quantization = problem.quantization;
  if (problem.dtype != DType::kBFloat16) return "decodes W to bf16 only";
  if (problem.out_dtype != problem.dtype && problem.out_dtype != DType::kFloat32) {
    return std::string("the output is ") + to_string(problem.out_dtype) + ", must be bf16 or fp32";
  }
  if (problem.activation) return "leaves the activation to a pass after it";
  if (problem.input_alignment < 16) {
    return "base addresses and row pitches of inputs must be multiples of 16 bytes";
  }
  if (problem.packed_alignment < 16) return "rows of packed weights must be multiples of 16 bytes";
  if (problem.scales_alignment < scale_bytes(quantization.scale_type)) {
    return "W's scales are not at a multiple of their size";
  }
  if (problem.low_rank % 8 != 0) {
    return "low_rank = " + std::to_string(problem.low_rank) + " is not a multiple of 8";
  }
  if (quantization.format == WeightFormat::kInt4 &&
      (quantization.scale_type != ScaleType::kBFloat16 || problem.scales_alignment < 4)) {
    return "decodes int4 with bf16 scales in rows of multiples of 4 bytes only";
  }
  if (quantization.format == WeightFormat::kFp8 && quantization.block_k < problem.k &&
      quantization.block_k != 128) {
    return "decodes fp8 in blocks of 128 columns or of whole rows only";
  }
  if (quantization.bits() == 4 && problem.k <= 2 * kStreamRowBytes) {
    return "K = " + std::to_string(problem.k) + " is one stage, must be more";
  }
  if (quantization.format == WeightFormat::kNf4 &&
      (quantization.block_k < 64 || problem.k % quantization.block_k != 0)) {
    return "decodes nf4 in blocks of 64 and more that rows of W are multiples of, these are of " +
           std::to_string(quantization.block_k) + " in rows of " + std::to_string(problem.k);
  }
  if (std::string reason = refuse_far_apart(problem); !reason.empty()) return reason;
  if (has_too_many_tiles(entry, problem, facts)) return "more than 2^30 output tiles";
  return refuse_size(entry, problem, facts);
}

LaunchPolicy launch_policy(const KernelEntry& entry, const Problem& problem,
                           const DeviceFacts& facts) {
  const std::int64_t slots = row_slots(entry, problem, facts.shared_memory_bytes);
  return {.grid = persistent_grid(entry, problem, facts),
          .tile_rows = tile_rows(entry, slots),
          .smem_bytes = fixed_bytes(entry, problem) + slots * stream_row_pitch(problem.k)};
}

void launch_stream(const KernelEntry& entry, const Step& step, const Problem& problem,
                   const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  StreamGemmParams params = {};
  static_cast<RowGemmParams&>(params) = make_row_params(problem, operands);
  params.row_slots = static_cast<int>(row_slots(entry, problem, step.smem_bytes));
  params.granule = granule_of(params.row_slots);
  params.tile_rows = step.tile.rows;
  params.shared_pitch = static_cast<int>(stream_row_pitch(problem.k));
  params.column_tiles = static_cast<int>(column_tiles(problem));
  params.column_divisor = make_fast_divisor(static_cast<std::uint32_t>(params.column_tiles));
  params.scale_columns = static_cast<int>((problem.k + problem.quantization.block_k - 1) /
                                          problem.quantization.block_k);
  const std::int64_t stage_depth = entry.info.tile.depth;
  const bool single_last = (problem.k + stage_depth - 1) / stage_depth % kBlockStages == 1;
  params.first_scales = static_cast<int>(single_last ? stage_depth : 0);
  launch_prepared(entry, step, problem, &params, stream);  // its blocks need no tile counter
}

template <StreamGemm Kernel>
const void* function(const Problem&) {
  return stream_gemm_functions<Kernel, DType::kBFloat16>().plain;
}

template <StreamGemm Kernel>
KernelEntry stream_entry(BackendKind backend) {
  using Traits = StreamTraits<Kernel>;
  using Layout = StreamLayout<Traits>;
  return {.info = {.backend = backend,
                   .name = std::string(to_string(backend)) + "_forward_" +
                           to_string(Kernel.weights) + "_stream_w" + std::to_string(Kernel.warps) +
                           "_s" + std::to_string(Kernel.stages) +
                           (Kernel.arch > 80 ? "_arch" + std::to_string(Kernel.arch) : ""),
                   .op = Kernel.op,
                   .tile = {Traits::kRows, kStreamFeatures, Traits::kStageDepth},
                   .stages = Kernel.stages,
                   .weights = Kernel.weights},
          .arch = Kernel.arch,
          .exact = Kernel.exact,
          .threads = Traits::kThreads,
          .copies_apart = false,
          .tiles = most_row_tiles,
          .smem_bytes =
              [](const Problem& problem) {
                return Layout::rows(problem.experts) +
                       kLeastStreamRows * stream_row_pitch(problem.k);
              },
          .function = function<Kernel>,
          .refuse = refuse,
          .grid = launch_policy,
          .launch = launch_stream};
}

}  // namespace

std::vector<KernelEntry> stream_gemm_kernels(BackendKind backend) {
  std::vector<KernelEntry> kernels = {
#define MOEGEMM_STREAM_GEMM(...) stream_entry<StreamGemm{__VA_ARGS__}>(backend),
#include "cuda/instances/sm80.inc"
  };
  // Where there are two lines for a format, Hopper's own is the first.
  if (backend == BackendKind::kSm90) {
    std::erase_if(kernels, [](const KernelEntry& entry) {
      return entry.info.weights == WeightFormat::kFp8 && entry.arch < 90;
    });
  }
  return kernels;
}

}  // namespace moegemm::cuda::sm80
