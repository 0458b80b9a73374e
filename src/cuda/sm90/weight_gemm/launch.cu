#include <cstdint>
#include <string>
#include <vector>

#include "cuda/backend/kernel_entry.h"
#include "cuda/backend/launch/empty_output.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/backend/launch/tensor_map.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/weight_gemm/params.h"

namespace moegemm::cuda::sm90 {
namespace {

/// Operands by wgmma's sides. A tile has tile.rows columns of A and tile.columns of B.
struct Sides {
  bool a_is_x;
  int a_cols;
  int b_cols;
};

Sides sides_of(const TileShape& tile, const Problem& problem) {
  const bool a_is_x = a_side_is_x(problem.gathers_x(), problem.gathers_dy(), problem.n, problem.k,
                                  tile.rows, tile.columns);
  const auto n = static_cast<int>(problem.n);
  const auto k = static_cast<int>(problem.k);
  return {a_is_x, a_is_x ? k : n, a_is_x ? n : k};
}

std::int64_t total_tiles(const KernelInfo& info, const Problem& problem) {
  const Sides sides = sides_of(info.tile, problem);
  return problem.experts * ceil_div(sides.a_cols, info.tile.rows) *
         ceil_div(sides.b_cols, info.tile.columns);
}

/// Else the last slab of a row would reach past it.
bool fits_one_box(std::int64_t columns) { return columns % kSlabCols == 0; }

/// See WeightGemmParams. `tile_columns` are what a stage takes of the operand.
CUtensorMap input_map(const TileShape& tile, const Problem& problem, const void* base,
                      std::int64_t columns, std::int64_t stride, int tile_columns) {
  const std::int64_t pitch = stride * size_bytes(problem.dtype);
  if (fits_one_box(columns)) {
    return encode(tensor_spec(
        base, problem.dtype, {kSlabCols, tile.depth, columns / kSlabCols, problem.rows},
        {pitch, kSlabCols * 2, pitch}, {kSlabCols, tile.depth, tile_columns / kSlabCols, 1}));
  }
  return encode(tensor_spec(base, problem.dtype, {columns, tile.depth, problem.rows},
                            {pitch, pitch}, {kSlabCols, tile.depth, 1}));
}

CUtensorMap output_map(const Problem& problem, const Operands& operands) {
  const std::int64_t element_bytes = size_bytes(problem.out_dtype);
  const std::int64_t pitch = operands.out_stride * element_bytes;
  return encode(tensor_spec(operands.out, problem.out_dtype,
                            {problem.k, problem.n, problem.experts}, {pitch, pitch * problem.n},
                            {128 / element_bytes, 64, 1}));
}

WeightGemmParams make_params(const Step& step, const Problem& problem, const Operands& operands) {
  WeightGemmParams params = {};
  static_cast<SegmentParams&>(params) = segment_params(problem, operands);
  const auto [a_is_x, a_cols, b_cols] = sides_of(step.tile, problem);
  params.a_is_x = a_is_x;
  params.a_cols = a_cols;
  params.b_cols = b_cols;
  params.tiling = {ceil_div(a_cols, step.tile.rows), ceil_div(b_cols, step.tile.columns),
                   (step.order == TileOrder::kAlongColumns) != a_is_x};
  const void* a = a_is_x ? operands.x : operands.dy;
  const std::int64_t a_stride = a_is_x ? operands.x_stride : operands.dy_stride;
  const void* b = a_is_x ? operands.dy : operands.x;
  const std::int64_t b_stride = a_is_x ? operands.dy_stride : operands.x_stride;
  params.b_map = input_map(step.tile, problem, b, b_cols, b_stride, step.tile.columns);
  params.b_in_one_box = fits_one_box(b_cols);
  params.out_map = output_map(problem, operands);
  if (problem.permutation != Permutation::kNone) {
    params.opposite_is_a = a_is_x == (problem.permutation == Permutation::kY);
    params.opposite = static_cast<const unsigned char*>(params.opposite_is_a ? a : b);
    params.opposite_row_bytes =
        (params.opposite_is_a ? a_stride : b_stride) * size_bytes(problem.dtype);
    params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
  }
  if (problem.gathers()) {
    params.a_map = params.b_map;  // valid to prefetch, never read through
    params.gathered = static_cast<const unsigned char*>(a);
    params.gathered_row_chunks = static_cast<unsigned>(a_stride * size_bytes(problem.dtype) / 16);
    params.gather_divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  } else {
    params.a_map = input_map(step.tile, problem, a, a_cols, a_stride, step.tile.rows);
    params.a_in_one_box = fits_one_box(a_cols);
  }
  params.flat_rows = static_cast<int>(problem.flat_rows());
  params.output = problem.accumulate                     ? WeightOutput::kAddToFloat32
                  : problem.out_dtype == DType::kFloat32 ? WeightOutput::kFloat32
                                                         : WeightOutput::kInputType;
  return params;
}

LaunchPolicy grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  return {.grid = persistent_grid(entry, problem, facts),
          .order = weight_tile_order(problem, facts)};
}

std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  if (std::string reason = refuse_operands(problem); !reason.empty()) return reason;
  if (problem.out_dtype != problem.dtype && problem.out_dtype != DType::kFloat32) {
    return std::string("dW is ") + to_string(problem.out_dtype) + ", must be " +
           to_string(problem.dtype) + " or fp32";
  }
  if (problem.accumulate && problem.out_dtype != DType::kFloat32) {
    return std::string("accumulates into ") + to_string(problem.out_dtype) + ", must be fp32";
  }
  if (problem.gathers() && problem.far_rows) {
    return "gathers from at most 64 GiB, the permuted operand spans more";
  }
  if (problem.rows > 0 && problem.flat_rows() == 0) return "needs at least one slot";
  if (problem.multiply) return "leaves the multiplication by router weights to a pass before it";
  if (problem.k % 8 != 0) return "K = " + std::to_string(problem.k) + " is not a multiple of 8";
  if (problem.n % 8 != 0) return "N = " + std::to_string(problem.n) + " is not a multiple of 8";
  if (problem.output_alignment < 16) {
    return "base addresses and row pitches must be multiples of 16 bytes";
  }
  if (std::string reason = refuse_size(entry, problem, facts); !reason.empty()) return reason;
  // Tiles with one side of 64 columns would read the other operand of a wide dW too often.
  constexpr int kMostThinTiles = 4;
  const Sides sides = sides_of(entry.info.tile, problem);
  if (entry.info.tile.columns <= kSlabCols && sides.b_cols > kMostThinTiles * kSlabCols) {
    return "is for one side of up to " + std::to_string(kMostThinTiles * kSlabCols) +
           " columns, here it has " + std::to_string(sides.b_cols);
  }
  return {};
}

void launch_weights(const KernelEntry& entry, const Step& step, const Problem& problem,
                    const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  if (problem.rows == 0) return zero_weight_gradient(problem, operands, stream);
  WeightGemmParams params = make_params(step, problem, operands);
  launch_kernel(entry, step, problem, params, entry.smem_bytes(problem), stream);
}

std::string name_of(const WeightGemm& kernel) {
  return "sm90_dw_" + std::to_string(kernel.a_cols) + "x" + std::to_string(kernel.b_cols) + "x" +
         std::to_string(kernel.rows) + "_s" + std::to_string(kernel.stages);
}

template <WeightGemm Kernel>
struct Functions {
  template <DType D>
  KernelFunctions operator()() const {
    return weight_gemm_functions<Kernel, D>();
  }
};

template <WeightGemm Kernel>
const void* function(const Problem& problem) {
  const KernelFunctions functions =
      with_format(TensorCoreFormats(), problem.dtype, Functions<Kernel>());
  return problem.out_dtype == DType::kFloat32 ? functions.fp32_output : functions.plain;
}

template <WeightGemm Kernel>
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
                using Traits = WeightGemmTraits<Kernel, DType::kBFloat16, false>;
                return static_cast<std::int64_t>(sizeof(WeightGemmShared<Traits>)) +
                       problem.experts * kSharedBytesPerExpert;
              },
          .function = function<Kernel>,
          .layer_functions = layer_functions(Functions<Kernel>(), TensorCoreFormats()),
          .refuse = refuse,
          .grid = grid,
          .launch = launch_weights};
}

}  // namespace

std::vector<KernelEntry> weight_gemm_kernels() {
  return {
#define MOEGEMM_WEIGHT_GEMM(...) entry_of<WeightGemm{__VA_ARGS__}>(),
#include "cuda/instances/sm90.inc"
  };
}

}  // namespace moegemm::cuda::sm90
