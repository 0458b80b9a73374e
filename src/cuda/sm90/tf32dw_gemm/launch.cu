#include <cstdint>
#include <string>
#include <vector>

#include "cuda/backend/kernel_entry.h"
#include "cuda/backend/launch/empty_output.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/backend/launch/tensor_map.h"
#include "cuda/device/schedule/tile_split.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/tf32dw_gemm/params.h"

namespace moegemm::cuda::sm90 {
namespace {

/// Operands by wgmma's sides: what is gathered goes through registers, which is B.
struct Sides {
  bool a_is_x;
  std::int64_t a_cols;
  std::int64_t b_cols;
};

Sides sides_of(const Problem& problem) {
  const bool a_is_x = !problem.gathers_x();
  return {a_is_x, a_is_x ? problem.k : problem.n, a_is_x ? problem.n : problem.k};
}

std::int64_t tiles_along(std::int64_t columns, int tile) { return (columns + tile - 1) / tile; }

std::int64_t total_tiles(const KernelInfo& info, const Problem& problem) {
  const Sides sides = sides_of(problem);
  return problem.experts * tiles_along(sides.a_cols, info.tile.rows) *
         tiles_along(sides.b_cols, info.tile.columns);
}

/// See Tf32dwParams.
CUtensorMap a_map(const TileShape& tile, const Problem& problem, const void* base,
                  std::int64_t columns, std::int64_t pitch) {
  constexpr std::int64_t kSlab = 32;
  TensorMapSpec spec =
      columns % kSlab == 0
          ? tensor_spec(base, problem.dtype, {kSlab, problem.rows, columns / kSlab}, {pitch, 128},
                        {kSlab, tile.depth, tile.rows / kSlab})
          : tensor_spec(base, problem.dtype, {columns, problem.rows}, {pitch}, {kSlab, tile.depth});
  spec.rounds_to_tf32 = true;
  return encode(spec);
}

Tf32dwParams make_params(const Step& step, const Problem& problem, const Operands& operands) {
  Tf32dwParams params = {};
  static_cast<SegmentParams&>(params) = segment_params(problem, operands);
  const Sides sides = sides_of(problem);
  const void* a = sides.a_is_x ? operands.x : operands.dy;
  const void* b = sides.a_is_x ? operands.dy : operands.x;
  const std::int64_t a_pitch = (sides.a_is_x ? operands.x_stride : operands.dy_stride) * 4;
  const std::int64_t b_pitch = (sides.a_is_x ? operands.dy_stride : operands.x_stride) * 4;
  params.a_map = a_map(step.tile, problem, a, sides.a_cols, a_pitch);
  params.a_in_one_box = sides.a_cols % 32 == 0;
  params.a_is_x = sides.a_is_x;
  params.accumulate = problem.accumulate;
  params.gathered = problem.gathers();
  params.b = static_cast<const std::byte*>(b);
  params.b_row_bytes = b_pitch;
  if (problem.permutation != Permutation::kNone) {
    params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
    params.divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  }
  params.out = static_cast<float*>(operands.out);
  params.out_stride = operands.out_stride;
  params.expert_stride = operands.out_stride * problem.n;
  params.a_cols = static_cast<int>(sides.a_cols);
  params.b_cols = static_cast<int>(sides.b_cols);
  params.flat_rows = static_cast<int>(problem.flat_rows());
  params.tiling = {static_cast<int>(tiles_along(sides.a_cols, step.tile.rows)),
                   static_cast<int>(tiles_along(sides.b_cols, step.tile.columns)),
                   (step.order == TileOrder::kAlongColumns) != sides.a_is_x};
  return params;
}

LaunchPolicy grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  return {.grid = persistent_grid(entry, problem, facts),
          .order = weight_tile_order(problem, facts)};
}

std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  if (std::string reason = refuse_operands(problem, true); !reason.empty()) return reason;
  if (problem.rows > 0 && problem.flat_rows() == 0) return "needs at least one slot";
  if (problem.multiply) return "leaves the multiplication by router weights to a pass before it";
  if (problem.k % 4 != 0) return "K = " + std::to_string(problem.k) + " is not a multiple of 4";
  if (problem.n % 4 != 0) return "N = " + std::to_string(problem.n) + " is not a multiple of 4";
  if (problem.output_alignment < 16) {
    return "base addresses and row pitches must be multiples of 16 bytes";
  }
  return refuse_size(entry, problem, facts);
}

void launch_tf32dw(const KernelEntry& entry, const Step& step, const Problem& problem,
                   const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  if (problem.rows == 0) return zero_weight_gradient(problem, operands, stream);
  Tf32dwParams params = make_params(step, problem, operands);
  launch_kernel(entry, step, problem, params, entry.smem_bytes(problem), stream);
}

std::string name_of(const Tf32dwGemm& kernel) {
  return "sm90_dw_tf32_" + std::to_string(kernel.a_cols) + "x" + std::to_string(kernel.b_cols) +
         "x" + std::to_string(kernel.rows) + "_s" + std::to_string(kernel.stages);
}

template <Tf32dwGemm Kernel>
KernelEntry entry_of() {
  return {.info = {.backend = BackendKind::kSm90,
                   .name = name_of(Kernel),
                   .op = Kernel.op,
                   .tile = {Kernel.a_cols, Kernel.b_cols, Kernel.rows},
                   .stages = Kernel.stages},
          .arch = Kernel.arch,
          .exact = Kernel.exact,
          .threads = kThreads,
          .tiles = total_tiles,
          .smem_bytes =
              [](const Problem& problem) {
                constexpr int kBytesPerExpert = sizeof(int) + sizeof(unsigned short);
                return static_cast<std::int64_t>(sizeof(Tf32dwShared<Tf32dwTraits<Kernel>>)) +
                       problem.experts * kBytesPerExpert;
              },
          .function =
              [](const Problem&) { return tf32dw_gemm_functions<Kernel, DType::kFloat32>().plain; },
          .refuse = refuse,
          .grid = grid,
          .launch = launch_tf32dw};
}

}  // namespace

std::vector<KernelEntry> tf32dw_gemm_kernels() {
  return {
#define MOEGEMM_TF32DW_GEMM(...) entry_of<Tf32dwGemm{__VA_ARGS__}>(),
#include "cuda/instances/sm90.inc"
  };
}

}  // namespace moegemm::cuda::sm90
