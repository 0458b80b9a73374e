#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/backend/empty_output.h"
#include "cuda/backend/kernel_entry.h"
#include "cuda/backend/tensor_map.h"
#include "cuda/sm90/heuristic.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/row_gemm/params.h"

namespace moegemm::cuda::sm90 {
namespace {

/// A row problem in the kernels' terms.
struct RowProblem {
  std::int64_t features;  ///< columns of the product
  std::int64_t depth;     ///< contraction
  const void* rows;
  std::int64_t row_stride;
};

RowProblem row_problem(const Problem& problem, const Operands& operands) {
  if (problem.op == Op::kForward) return {problem.n, problem.k, operands.x, operands.x_stride};
  return {problem.k, problem.n, operands.dy, operands.dy_stride};
}

bool needs_row_info(const Problem& problem) { return problem.scatters() || problem.multiply; }

LaunchPolicy grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const bool pass = weights_pass_through_l2(problem, entry.info.tile, facts.l2_bytes);
  return {.grid = persistent_grid(entry, problem, facts),
          .weights = pass ? WeightCaching::kPassThrough : WeightCaching::kKeep};
}

std::string refuse(const RowGemm& kernel, const KernelEntry& entry, const Problem& problem,
                   const DeviceFacts& facts) {
  if (std::string reason = refuse_operands(problem); !reason.empty()) return reason;
  if (!entry.function(problem)) {
    return problem.gathers() ? "is not compiled for gathered rows"
                             : "is compiled for gathered rows only";
  }
  const std::int64_t depth = row_problem(problem, {}).depth;
  if (problem.gathers() && depth % 8 != 0) {
    return (problem.op == Op::kForward ? "K = " : "N = ") + std::to_string(depth) +
           " is not a multiple of 8, which gathered rows need";
  }
  if (std::string reason = refuse_size(entry, problem, facts); !reason.empty()) return reason;
  // Last: a problem that no kernel runs is told what is wrong with it, not what else there is.
  if (problem.activation && !kernel.activated) return "leaves the activation to a pass behind it";
  if (!problem.activation && kernel.activated) return "stores activated rows only";
  if (problem.bias && problem.gathers() && !kernel.activated && !kernel.adds_bias()) {
    return "adds no bias to gathered rows";
  }
  if (kernel.activated && problem.out_dtype == DType::kFloat32) {
    return "stores activated rows in the dtype of the inputs only";
  }
  return {};
}

/// dX reads W in slabs of 64 columns. Where they do not divide K, the last one would reach past a
/// row.
bool weights_in_slabs(const Problem& problem) {
  return problem.op == Op::kDx && problem.k % 64 != 0;
}

/// The map of an activated tile: gates and ups are a dimension of their own, so that one box holds
/// half of the tile's features of each.
TensorMapSpec activated_weights(const RowGemm& kernel, const Problem& problem,
                                std::uint64_t pitch) {
  const Activation& activation = *problem.activation;
  const std::uint64_t parts = activation.gated() ? 2 : 1;
  const std::uint64_t columns = static_cast<std::uint64_t>(problem.n) / parts;
  const bool interleaved = activation.layout == GateLayout::kInterleaved;
  TensorMapSpec spec;
  spec.rank = 4;
  spec.dims = {static_cast<std::uint64_t>(problem.k), columns, parts,
               static_cast<std::uint64_t>(problem.experts)};
  spec.strides_bytes = {interleaved ? 2 * pitch : pitch, interleaved ? pitch : pitch * columns,
                        pitch * static_cast<std::uint64_t>(problem.n)};
  spec.box = {kDepth, static_cast<std::uint32_t>(kernel.features / parts),
              static_cast<std::uint32_t>(parts), 1};
  return spec;
}

CUtensorMap weights_map(const RowGemm& kernel, const Problem& problem, const Operands& operands) {
  const auto k = static_cast<std::uint64_t>(problem.k);
  const auto n = static_cast<std::uint64_t>(problem.n);
  const auto experts = static_cast<std::uint64_t>(problem.experts);
  const auto pitch = static_cast<std::uint64_t>(operands.w_stride * size_bytes(problem.dtype));
  TensorMapSpec spec;
  if (kernel.activated) {
    spec = activated_weights(kernel, problem, pitch);
  } else if (problem.op == Op::kForward || weights_in_slabs(problem)) {
    const int features = problem.op == Op::kForward ? kernel.features : 64;
    spec.rank = 3;
    spec.dims = {k, n, experts};
    spec.strides_bytes = {pitch, pitch * n};
    spec.box = {kDepth, static_cast<std::uint32_t>(features), 1};
  } else {
    spec.rank = 4;
    spec.dims = {64, n, k / 64, experts};
    spec.strides_bytes = {pitch, kRowBytes, pitch * n};
    spec.box = {64, kDepth, static_cast<std::uint32_t>(kernel.features / 64), 1};
  }
  spec.base = operands.w;
  spec.dtype = problem.dtype;
  return encode(spec);
}

CUtensorMap rows_map(const Problem& problem, const RowProblem& rows, int box_rows) {
  TensorMapSpec spec;
  spec.base = rows.rows;
  spec.dtype = problem.dtype;
  spec.rank = 2;
  spec.dims = {static_cast<std::uint64_t>(rows.depth), static_cast<std::uint64_t>(problem.rows)};
  spec.strides_bytes = {static_cast<std::uint64_t>(rows.row_stride * size_bytes(problem.dtype))};
  spec.box = {kDepth, static_cast<std::uint32_t>(box_rows)};
  return encode(spec);
}

RowGemmParams make_params(const RowGemm& kernel, const Step& step, const Problem& problem,
                          const Operands& operands) {
  const RowProblem rows = row_problem(problem, operands);
  RowGemmParams params = {};
  params.weights_map = weights_map(kernel, problem, operands);
  params.weights_in_slabs = weights_in_slabs(problem);
  params.weights_pass_through = step.weights == WeightCaching::kPassThrough;
  if (!problem.gathers()) {
    for (int box = 0; box < kernel.boxes(); ++box) {
      params.rows_maps[box] = rows_map(problem, rows, kernel.box_rows(box));
    }
  }
  params.rows = static_cast<const std::byte*>(rows.rows);
  params.row_bytes = rows.row_stride * size_bytes(problem.dtype);
  params.out = operands.out;
  params.out_stride = operands.out_stride;
  params.m_sizes = {operands.m_sizes, problem.sizes_dtype == DType::kInt64};
  params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
  params.router_weights = operands.router_weights;
  params.bias = operands.bias;
  params.bias_stride = operands.bias_stride;
  params.experts = static_cast<int>(problem.experts);
  params.total_rows = static_cast<int>(problem.rows);
  params.flat_rows = static_cast<int>(problem.flat_rows());
  params.features = static_cast<int>(rows.features);
  params.depth = static_cast<int>(rows.depth);
  params.divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  params.scatter = problem.scatters();
  params.multiply = problem.multiply;
  params.weights_are_fp32 = problem.weights_dtype == DType::kFloat32;
  params.out_is_fp32 = problem.out_dtype == DType::kFloat32;
  params.rounds = !params.out_is_fp32;
  params.vector_store = problem.output_alignment >= 16 && problem.output_columns() % 8 == 0;
  if (kernel.activated) {
    const bool interleaved = problem.activation->layout == GateLayout::kInterleaved;
    params.activation = *problem.activation;
    params.columns = static_cast<int>(problem.output_columns());
    params.bias_step = interleaved ? 2 : 1;
    params.first_up = !params.activation.gated() ? 0 : (interleaved ? 1 : params.columns);
  }
  return params;
}

void launch_rows(const RowGemm& kernel, const KernelEntry& entry, const Step& step,
                 const Problem& problem, const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  RowGemmParams params = make_params(kernel, step, problem, operands);
  const std::int64_t smem_bytes = entry.smem_bytes(problem);
  const std::int64_t left = device_facts(problem.device.index)->shared_memory_bytes - smem_bytes;
  const std::int64_t more_words =
      params.scatter ? std::min<std::int64_t>(left / 4, kMostNamedWords - kLeastNamedWords) : 0;
  params.named_words = kLeastNamedWords + static_cast<int>(more_words);
  launch_kernel(entry, step, problem, params, smem_bytes + 4 * more_words, stream);
}

std::string name_of(const RowGemm& kernel) {
  return std::string(kernel.op == Op::kForward ? "sm90_forward_" : "sm90_dx_") +
         (kernel.activated ? "activated_" : "") + std::to_string(kernel.features) + "x" +
         std::to_string(kernel.rows) + "_s" + std::to_string(kernel.stages) +
         (kernel.pingpong() ? "_pingpong" : "_coop");
}

template <RowGemm Kernel>
const void* function(const Problem& problem) {
  const KernelFunctions functions = problem.dtype == DType::kFloat16
                                        ? row_gemm_functions<Kernel, DType::kFloat16>()
                                        : row_gemm_functions<Kernel, DType::kBFloat16>();
  if (problem.gathers()) return functions.gathered;
  return problem.bias && functions.biased ? functions.biased : functions.plain;
}

template <RowGemm Kernel>
KernelEntry entry_of() {
  return {.info = {.backend = BackendKind::kSm90,
                   .name = name_of(Kernel),
                   .op = Kernel.op,
                   .tile = {Kernel.rows, Kernel.features, kDepth},
                   .stages = Kernel.stages},
          .arch = Kernel.arch,
          .exact = Kernel.exact,
          .threads = kThreads,
          .tiles = most_row_tiles,
          .smem_bytes =
              [](const Problem& problem) {
                using Traits = RowGemmTraits<Kernel, DType::kBFloat16, false>;
                return RowGemmLayout<Traits>::total(problem.experts, needs_row_info(problem));
              },
          .function = function<Kernel>,
          .layer_functions = layer_functions(row_gemm_functions<Kernel, DType::kBFloat16>(),
                                             row_gemm_functions<Kernel, DType::kFloat16>()),
          .refuse = [](const KernelEntry& entry, const Problem& problem,
                       const DeviceFacts& facts) { return refuse(Kernel, entry, problem, facts); },
          .grid = grid,
          .launch =
              [](const KernelEntry& entry, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) {
                launch_rows(Kernel, entry, step, problem, operands, stream);
              }};
}

}  // namespace

std::vector<KernelEntry> row_gemm_kernels() {
  return {
#define MOEGEMM_ROW_GEMM(...) entry_of<RowGemm{__VA_ARGS__}>(),
#define MOEGEMM_WEIGHT_GEMM(...)
#include "cuda/instances/sm90.inc"
#undef MOEGEMM_ROW_GEMM
#undef MOEGEMM_WEIGHT_GEMM
  };
}

}  // namespace moegemm::cuda::sm90
