#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/host/error.h"
#include "cuda/host/launch.h"
#include "cuda/host/loading.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/tile_counters.h"
#include "cuda/sm90/kernel_entry.h"
#include "cuda/sm90/weight_gemm/kernel.cuh"

namespace moegemm::cuda::sm90 {
namespace {

/// One tile shape with its compiled functions.
struct CompiledWeightGemm {
  int a_cols;
  int b_cols;
  int rows;
  int stages;
  int smem_bytes;               ///< beside the experts' prefix sums
  const void* functions[2][2];  ///< [fp16][fp32 output]
};

template <typename T, int A, int B, int Rows, int Stages, bool FloatOutput>
const void* function() {
  return reinterpret_cast<const void*>(
      &weight_gemm<WeightShape<T, A, B, Rows, Stages, FloatOutput>>);
}

template <int A, int B, int Rows, int Stages>
CompiledWeightGemm compiled() {
  return {A,
          B,
          Rows,
          Stages,
          sizeof(WeightSmem<WeightShape<__half, A, B, Rows, Stages, false>>),
          {{function<__nv_bfloat16, A, B, Rows, Stages, false>(),
            function<__nv_bfloat16, A, B, Rows, Stages, true>()},
           {function<__half, A, B, Rows, Stages, false>(),
            function<__half, A, B, Rows, Stages, true>()}}};
}

const std::vector<CompiledWeightGemm>& all_compiled() {
  static const std::vector<CompiledWeightGemm> all = {
#define MOEGEMM_WEIGHT_KERNEL(...) compiled<__VA_ARGS__>(),
#include "cuda/instances/sm90_weight.inc"
#undef MOEGEMM_WEIGHT_KERNEL
  };
  return all;
}

const CompiledWeightGemm& compiled_at(int family_index) {
  return all_compiled()[static_cast<std::size_t>(family_index)];
}

const ListedKernels listed(
    [] {
      std::vector<const void*> functions;
      for (const CompiledWeightGemm& kernel : all_compiled()) {
        for (const auto& of_dtype : kernel.functions) functions.push_back(of_dtype[0]);
      }
      return functions;
    },
    9, 9);

std::int64_t tiles(std::int64_t cols, int tile) { return (cols + tile - 1) / tile; }

std::int64_t total_tiles(const CompiledWeightGemm& kernel, const Problem& problem) {
  const bool a_is_x = a_side_is_x(problem.gathers_x(), problem.gathers_dy(), problem.n, problem.k,
                                  kernel.a_cols, kernel.b_cols);
  return problem.experts * tiles(a_is_x ? problem.k : problem.n, kernel.a_cols) *
         tiles(a_is_x ? problem.n : problem.k, kernel.b_cols);
}

/// Tiles next to each other run at the same time and share one operand's panel, while the other's
/// panels are all read once per lap. Along K first, so that neighbours write neighbouring parts of
/// the same output rows, unless a lap along K reads more of X than L2 keeps and one along N reads
/// less of dY.
bool k_tiles_first(const Problem& problem, std::int64_t l2_bytes) {
  const std::int64_t rows = problem.rows / std::max<std::int64_t>(problem.experts, 1);
  return problem.k <= problem.n || rows * problem.k * size_bytes(problem.dtype) <= l2_bytes / 2;
}

WeightTiling make_tiling(const CompiledWeightGemm& kernel, const Problem& problem,
                         TileOrder order) {
  WeightTiling tiling;
  tiling.a_is_x = a_side_is_x(problem.gathers_x(), problem.gathers_dy(), problem.n, problem.k,
                              kernel.a_cols, kernel.b_cols);
  tiling.a_cols = static_cast<int>(tiling.a_is_x ? problem.k : problem.n);
  tiling.b_cols = static_cast<int>(tiling.a_is_x ? problem.n : problem.k);
  tiling.a_tiles = static_cast<int>(tiles(tiling.a_cols, kernel.a_cols));
  tiling.b_tiles = static_cast<int>(tiles(tiling.b_cols, kernel.b_cols));
  tiling.a_fastest = (order == TileOrder::kAlongColumns) == tiling.a_is_x;
  return tiling;
}

/// Else the last slab of a row would reach past it.
bool fits_one_box(std::int64_t columns) { return columns % kSlabCols == 0; }

/// See WeightGemmParams. `tile_columns` are what a stage takes of the operand.
CUtensorMap input_map(const CompiledWeightGemm& kernel, const Problem& problem, const void* base,
                      std::int64_t columns, std::int64_t stride, int tile_columns) {
  const auto row_bytes = static_cast<std::uint64_t>(stride * size_bytes(problem.dtype));
  const auto stage_rows = static_cast<std::uint32_t>(kernel.rows);
  const auto rows = static_cast<std::uint64_t>(problem.rows);
  TensorMapSpec spec;
  spec.base = base;
  spec.dtype = problem.dtype;
  if (fits_one_box(columns)) {
    spec.rank = 4;
    spec.dims = {kSlabCols, stage_rows, static_cast<std::uint64_t>(columns / kSlabCols), rows};
    spec.strides_bytes = {row_bytes, kSlabCols * 2, row_bytes};
    spec.box = {kSlabCols, stage_rows, static_cast<std::uint32_t>(tile_columns / kSlabCols), 1};
  } else {
    spec.rank = 3;
    spec.dims = {static_cast<std::uint64_t>(columns), stage_rows, rows};
    spec.strides_bytes = {row_bytes, row_bytes};
    spec.box = {kSlabCols, stage_rows, 1};
  }
  return encode(spec);
}

CUtensorMap output_map(const Problem& problem, const Operands& operands) {
  const std::int64_t element_bytes = size_bytes(problem.out_dtype);
  TensorMapSpec spec;
  spec.base = operands.out;
  spec.dtype = problem.out_dtype;
  spec.rank = 3;
  spec.dims = {static_cast<std::uint64_t>(problem.k), static_cast<std::uint64_t>(problem.n),
               static_cast<std::uint64_t>(problem.experts)};
  spec.strides_bytes = {
      static_cast<std::uint64_t>(operands.out_stride * element_bytes),
      static_cast<std::uint64_t>(operands.out_stride * problem.n * element_bytes)};
  spec.box = {static_cast<std::uint32_t>(128 / element_bytes), 64, 1};
  return encode(spec);
}

WeightGemmParams make_params(const CompiledWeightGemm& kernel, const Step& step,
                             const Problem& problem, const Operands& operands) {
  WeightGemmParams params = {};
  params.tiling = make_tiling(kernel, problem, step.order);
  const bool a_is_x = params.tiling.a_is_x;
  const void* a = a_is_x ? operands.x : operands.dy;
  const std::int64_t a_stride = a_is_x ? operands.x_stride : operands.dy_stride;
  const void* b = a_is_x ? operands.dy : operands.x;
  const std::int64_t b_stride = a_is_x ? operands.dy_stride : operands.x_stride;
  params.b_map = input_map(kernel, problem, b, params.tiling.b_cols, b_stride, kernel.b_cols);
  params.b_in_one_box = fits_one_box(params.tiling.b_cols);
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
    params.a_map = input_map(kernel, problem, a, params.tiling.a_cols, a_stride, kernel.a_cols);
    params.a_in_one_box = fits_one_box(params.tiling.a_cols);
  }
  params.m_sizes = {operands.m_sizes, problem.sizes_dtype == DType::kInt64};
  params.experts = static_cast<int>(problem.experts);
  params.total_rows = static_cast<int>(problem.rows);
  params.flat_rows = static_cast<int>(problem.flat_rows());
  params.output = problem.accumulate                     ? WeightOutput::kAddToFloat32
                  : problem.out_dtype == DType::kFloat32 ? WeightOutput::kFloat32
                                                         : WeightOutput::kInputType;
  return params;
}

/// No rows anywhere: dW is zero, and a tensor map cannot describe an empty input.
void store_zeros(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  if (problem.accumulate) return;
  const std::int64_t element_bytes = size_bytes(problem.out_dtype);
  check(cudaMemset2DAsync(operands.out, operands.out_stride * element_bytes, 0,
                          problem.k * element_bytes, problem.experts * problem.n, stream),
        "set dW to zero");
}

LaunchPolicy policy(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const std::int64_t work = total_tiles(compiled_at(entry.family_index), problem);
  LaunchPolicy policy;
  policy.grid = static_cast<int>(std::clamp<std::int64_t>(work, 1, facts.multiprocessors));
  policy.order =
      k_tiles_first(problem, facts.l2_bytes) ? TileOrder::kAlongColumns : TileOrder::kAlongRows;
  return policy;
}

std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const CompiledWeightGemm& kernel = compiled_at(entry.family_index);
  if (problem.op != Op::kDw) return "computes dW only";
  if (problem.dtype != DType::kBFloat16 && problem.dtype != DType::kFloat16) {
    return std::string("inputs are ") + to_string(problem.dtype) + ", must be bf16 or fp16";
  }
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
  if (problem.multiply) return "leaves the multiplication by router weights to a pass before it";
  if (problem.k % 8 != 0) return "K = " + std::to_string(problem.k) + " is not a multiple of 8";
  if (problem.n % 8 != 0) return "N = " + std::to_string(problem.n) + " is not a multiple of 8";
  if (problem.input_alignment < 16 || problem.output_alignment < 16) {
    return "base addresses and row pitches must be multiples of 16 bytes";
  }
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (problem.rows > kMost || problem.slots > kMost || problem.n > kMost || problem.k > kMost) {
    return "M, N and K must be below 2^30";
  }
  // The tile number and a block's overshoot of it must fit 32 bits.
  if (problem.experts > kMost || total_tiles(kernel, problem) > kMost) {
    return "more than 2^30 output tiles";
  }
  const std::int64_t smem = kernel.smem_bytes + problem.experts * kSmemBytesPerExpert;
  if (smem > facts.shared_memory_bytes) {
    return std::to_string(problem.experts) + " experts need " + std::to_string(smem) +
           " bytes of shared memory, a block has " + std::to_string(facts.shared_memory_bytes);
  }
  return {};
}

void launch_entry(const KernelEntry& entry, const Step& step, const Problem& problem,
                  const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  if (problem.rows == 0) return store_zeros(problem, operands, stream);
  const CompiledWeightGemm& kernel = compiled_at(entry.family_index);
  WeightGemmParams params = make_params(kernel, step, problem, operands);
  params.counter =
      acquire_tile_counter(problem.device.index, stream, total_tiles(kernel, problem), step.grid);
  LaunchSpec spec;
  spec.function =
      kernel.functions[problem.dtype == DType::kFloat16][problem.out_dtype == DType::kFloat32];
  spec.name = entry.info.name.c_str();
  spec.grid = dim3(static_cast<unsigned>(step.grid));
  spec.block = dim3(kWeightGemmThreads);
  spec.dynamic_smem_bytes =
      kernel.smem_bytes + static_cast<int>(problem.experts) * kSmemBytesPerExpert;
  spec.device = problem.device.index;
  void* args[] = {&params};
  launch(spec, args, stream, step);
}

KernelEntry make_entry(int a_cols, int b_cols, int rows, int stages, int family_index) {
  KernelEntry entry;
  entry.info.backend = BackendKind::kSm90;
  entry.info.name = "sm90_dw_" + std::to_string(a_cols) + "x" + std::to_string(b_cols) + "x" +
                    std::to_string(rows) + "_s" + std::to_string(stages);
  entry.info.op = Op::kDw;
  entry.info.tile = {a_cols, b_cols, rows};
  entry.info.stages = stages;
  entry.policy = policy;
  entry.refuse = refuse;
  entry.launch = launch_entry;
  entry.family_index = family_index;
  return entry;
}

}  // namespace

std::span<const KernelEntry> weight_gemm_kernels() {
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> all;
    const auto add = [&all](int a_cols, int b_cols, int rows, int stages) {
      all.push_back(make_entry(a_cols, b_cols, rows, stages, static_cast<int>(all.size())));
    };
#define MOEGEMM_WEIGHT_KERNEL(...) add(__VA_ARGS__);
#include "cuda/instances/sm90_weight.inc"
#undef MOEGEMM_WEIGHT_KERNEL
    return all;
  }();
  return entries;
}

}  // namespace moegemm::cuda::sm90
