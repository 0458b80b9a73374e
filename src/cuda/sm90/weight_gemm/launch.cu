#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/backend/kernel_entry.h"
#include "cuda/backend/launch/empty_output.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/backend/launch/tensor_map.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/tf32dw_gemm/params.h"
#include "cuda/sm90/weight_gemm/params.h"

namespace moegemm::cuda::sm90 {
namespace {

/// Columns of the operands by wgmma's sides. A tile has kernel.a_cols of A and kernel.b_cols of B.
struct Sides {
  bool a_is_x;
  int a_cols;
  int b_cols;
};

Sides sides_of(const WeightGemm& kernel, const Problem& problem) {
  // TF32 goes through registers where it is gathered, which is B's way.
  const bool a_is_x = kernel.tf32 ? !problem.gathers_x()
                                  : a_side_is_x(problem.gathers_x(), problem.gathers_dy(),
                                                problem.n, problem.k, kernel.a_cols, kernel.b_cols);
  const auto n = static_cast<int>(problem.n);
  const auto k = static_cast<int>(problem.k);
  return {a_is_x, a_is_x ? k : n, a_is_x ? n : k};
}

WeightTiling tiling_of(const WeightGemm& kernel, const Sides& sides, TileOrder order) {
  return {ceil_div(sides.a_cols, kernel.a_cols), ceil_div(sides.b_cols, kernel.b_cols),
          (order == TileOrder::kAlongColumns) != sides.a_is_x};
}

template <WeightGemm Kernel>
std::int64_t total_tiles(const KernelInfo&, const Problem& problem) {
  const Sides sides = sides_of(Kernel, problem);
  const WeightTiling tiling = tiling_of(Kernel, sides, TileOrder::kAlongColumns);
  return problem.experts * tiling.a_tiles * tiling.b_tiles;
}

/// X or dY.
struct Input {
  const void* data;
  std::int64_t pitch;  ///< bytes
};

/// A and B.
std::pair<Input, Input> inputs_of(const Problem& problem, const Operands& operands, bool a_is_x) {
  const std::int64_t bytes = size_bytes(problem.dtype);
  const Input x = {operands.x, operands.x_stride * bytes};
  const Input dy = {operands.dy, operands.dy_stride * bytes};
  return a_is_x ? std::pair(x, dy) : std::pair(dy, x);
}

/// Else the last slab of a row would reach past it.
bool fits_one_box(const WeightGemm& kernel, std::int64_t columns) {
  return columns % kernel.slab_cols() == 0;
}

/// See WeightGemmParams. `tile_columns` are what a stage takes of the operand.
CUtensorMap input_map(const WeightGemm& kernel, const Problem& problem, const Input& input,
                      std::int64_t columns, int tile_columns) {
  const std::int64_t pitch = input.pitch;
  if (fits_one_box(kernel, columns)) {
    return encode(tensor_spec(
        input.data, problem.dtype, {kSlabCols, kernel.rows, columns / kSlabCols, problem.rows},
        {pitch, kSlabCols * 2, pitch}, {kSlabCols, kernel.rows, tile_columns / kSlabCols, 1}));
  }
  return encode(tensor_spec(input.data, problem.dtype, {columns, kernel.rows, problem.rows},
                            {pitch, pitch}, {kSlabCols, kernel.rows, 1}));
}

/// See Tf32dwParams.
CUtensorMap tf32_a_map(const WeightGemm& kernel, const Problem& problem, const Input& a,
                       std::int64_t columns) {
  constexpr std::int64_t kSlab = kTf32SlabCols;
  TensorMapSpec spec =
      fits_one_box(kernel, columns)
          ? tensor_spec(a.data, problem.dtype, {kSlab, problem.rows, columns / kSlab},
                        {a.pitch, 128}, {kSlab, kernel.rows, kernel.a_cols / kSlab})
          : tensor_spec(a.data, problem.dtype, {columns, problem.rows}, {a.pitch},
                        {kSlab, kernel.rows});
  spec.rounds_to_tf32 = true;
  return encode(spec);
}

CUtensorMap output_map(const Problem& problem, const Operands& operands) {
  const std::int64_t element_bytes = size_bytes(problem.out_dtype);
  const std::int64_t pitch = operands.out_stride * element_bytes;
  return encode(tensor_spec(operands.out, problem.out_dtype,
                            {problem.k, problem.n, problem.experts}, {pitch, pitch * problem.n},
                            {128 / element_bytes, 64, 1}));
}

/// What both kinds of kernel are told.
template <typename Params>
Params common_params(const WeightGemm& kernel, const Step& step, const Problem& problem,
                     const Operands& operands) {
  Params params = {};
  static_cast<SegmentParams&>(params) = segment_params(problem, operands);
  const Sides sides = sides_of(kernel, problem);
  params.a_is_x = sides.a_is_x;
  params.a_cols = sides.a_cols;
  params.b_cols = sides.b_cols;
  params.tiling = tiling_of(kernel, sides, step.order);
  if (problem.permutation != Permutation::kNone) {
    params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
    params.gather_divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  }
  params.flat_rows = static_cast<int>(problem.flat_rows());
  return params;
}

WeightGemmParams make_params(const WeightGemm& kernel, const Step& step, const Problem& problem,
                             const Operands& operands) {
  auto params = common_params<WeightGemmParams>(kernel, step, problem, operands);
  const auto [a, b] = inputs_of(problem, operands, params.a_is_x);
  params.b_map = input_map(kernel, problem, b, params.b_cols, kernel.b_cols);
  params.b_in_one_box = fits_one_box(kernel, params.b_cols);
  params.out_map = output_map(problem, operands);
  params.output = problem.accumulate                     ? WeightOutput::kAddToFloat32
                  : problem.out_dtype == DType::kFloat32 ? WeightOutput::kFloat32
                                                         : WeightOutput::kInputType;
  if (problem.permutation != Permutation::kNone) {
    params.opposite_is_a = params.a_is_x == (problem.permutation == Permutation::kY);
    const Input& opposite = params.opposite_is_a ? a : b;
    params.opposite = static_cast<const unsigned char*>(opposite.data);
    params.opposite_row_bytes = opposite.pitch;
  }
  if (problem.gathers()) {
    params.a_map = params.b_map;  // valid to prefetch, never read through
    params.gathered = static_cast<const unsigned char*>(a.data);
    params.gathered_row_chunks = static_cast<unsigned>(a.pitch / 16);
  } else {
    params.a_map = input_map(kernel, problem, a, params.a_cols, kernel.a_cols);
    params.a_in_one_box = fits_one_box(kernel, params.a_cols);
  }
  return params;
}

Tf32dwParams make_tf32_params(const WeightGemm& kernel, const Step& step, const Problem& problem,
                              const Operands& operands) {
  auto params = common_params<Tf32dwParams>(kernel, step, problem, operands);
  const auto [a, b] = inputs_of(problem, operands, params.a_is_x);
  params.a_map = tf32_a_map(kernel, problem, a, params.a_cols);
  params.a_in_one_box = fits_one_box(kernel, params.a_cols);
  params.accumulate = problem.accumulate;
  params.gathered = problem.gathers();
  params.b = static_cast<const std::byte*>(b.data);
  params.b_row_bytes = b.pitch;
  params.out = static_cast<float*>(operands.out);
  params.out_stride = operands.out_stride;
  params.expert_stride = operands.out_stride * problem.n;
  return params;
}

std::string refuse(const WeightGemm& kernel, const KernelEntry& entry, const Problem& problem,
                   const DeviceFacts& facts) {
  if (std::string reason = refuse_operands(problem, kernel.tf32); !reason.empty()) return reason;
  if (problem.out_dtype != problem.dtype && problem.out_dtype != DType::kFloat32) {
    return std::string("dW is ") + to_string(problem.out_dtype) + ", must be " +
           to_string(problem.dtype) + " or fp32";
  }
  if (problem.accumulate && problem.out_dtype != DType::kFloat32) {
    return std::string("accumulates into ") + to_string(problem.out_dtype) + ", must be fp32";
  }
  if (!kernel.tf32 && problem.gathers() && problem.far_rows) {
    return "gathers from at most 64 GiB, the permuted operand spans more";
  }
  if (problem.rows > 0 && problem.flat_rows() == 0) return "needs at least one slot";
  if (problem.multiply) return "leaves the multiplication by router weights to a pass before it";
  const std::int64_t chunk = 16 / size_bytes(problem.dtype);  // elements
  for (const auto& [name, columns] : {std::pair("K = ", problem.k), std::pair("N = ", problem.n)}) {
    if (columns % chunk != 0) {
      return name + std::to_string(columns) + " is not a multiple of " + std::to_string(chunk);
    }
  }
  if (problem.output_alignment < 16) {
    return "base addresses and row pitches must be multiples of 16 bytes";
  }
  if (std::string reason = refuse_size(entry, problem, facts); !reason.empty()) return reason;
  // Tiles with one side of 64 columns would read the other operand of a wide dW too often.
  constexpr int kMostThinTiles = 4;
  const Sides sides = sides_of(kernel, problem);
  if (kernel.b_cols <= kSlabCols && sides.b_cols > kMostThinTiles * kSlabCols) {
    return "is for one side of up to " + std::to_string(kMostThinTiles * kSlabCols) +
           " columns, here it has " + std::to_string(sides.b_cols);
  }
  return {};
}

template <WeightGemm Kernel>
void launch_weights(const KernelEntry& entry, const Step& step, const Problem& problem,
                    const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  if (problem.rows == 0) return zero_weight_gradient(problem, operands, stream);
  const auto launch_with = [&](auto params) {
    launch_kernel(entry, step, problem, params, stream);
  };
  if constexpr (Kernel.tf32) {
    launch_with(make_tf32_params(Kernel, step, problem, operands));
  } else {
    launch_with(make_params(Kernel, step, problem, operands));
  }
}

std::string name_of(const WeightGemm& kernel) {
  return std::string("sm90_dw_") + (kernel.tf32 ? "tf32_" : "") + std::to_string(kernel.a_cols) +
         "x" + std::to_string(kernel.b_cols) + "x" + std::to_string(kernel.rows) + "_s" +
         std::to_string(kernel.stages);
}

template <WeightGemm Kernel>
struct Functions {
  template <DType D>
  KernelFunctions operator()() const {
    if constexpr (Kernel.tf32) {
      return tf32dw_gemm_functions<Kernel, D>();
    } else {
      return weight_gemm_functions<Kernel, D>();
    }
  }
};

template <WeightGemm Kernel>
const void* function(const Problem& problem) {
  const KernelFunctions functions =
      with_format(FormatsOf<Kernel.tf32>(), problem.dtype, Functions<Kernel>());
  return problem.out_dtype == problem.dtype ? functions.plain : functions.fp32_output;
}

template <WeightGemm Kernel>
std::int64_t smem_bytes(const Problem& problem) {
  const std::int64_t of_experts = problem.experts * kSharedBytesPerExpert;
  if constexpr (Kernel.tf32) {
    return std::int64_t{sizeof(Tf32dwShared<Tf32dwTraits<Kernel>>)} + of_experts;
  } else {
    using Traits = WeightGemmTraits<Kernel, DType::kBFloat16, false>;
    return std::int64_t{sizeof(WeightGemmShared<Traits>)} + of_experts;
  }
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
          .tiles = total_tiles<Kernel>,
          .smem_bytes = smem_bytes<Kernel>,
          .function = function<Kernel>,
          .layer_functions = layer_functions_of<Kernel.tf32>(Functions<Kernel>()),
          .refuse = [](const KernelEntry& entry, const Problem& problem,
                       const DeviceFacts& facts) { return refuse(Kernel, entry, problem, facts); },
          .grid = weight_launch_policy,
          .launch = launch_weights<Kernel>};
}

}  // namespace

std::vector<KernelEntry> weight_gemm_kernels() {
  return {
#define MOEGEMM_WEIGHT_GEMM(...) entry_of<WeightGemm{__VA_ARGS__}>(),
#define MOEGEMM_TF32DW_GEMM(...) entry_of<Tf32dwGemm{__VA_ARGS__}>(),
#include "cuda/instances/sm90.inc"
  };
}

}  // namespace moegemm::cuda::sm90
