#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/host/device_facts.h"
#include "cuda/host/empty_output.h"
#include "cuda/host/launch.h"
#include "cuda/host/loading.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/tile_counters.h"
#include "cuda/sm90/heuristic.h"
#include "cuda/sm90/kernel_entry.h"
#include "cuda/sm90/row_gemm/instance.h"
#include "cuda/sm90/row_gemm/params.h"

namespace moegemm::cuda::sm90 {
namespace {

/// One line of instances/sm90_rows.inc with its compiled functions.
struct CompiledRowGemm {
  Op op;
  int features;
  int rows;
  int stages;
  int boxes;
  bool pingpong;
  bool activated;
  bool adds_bias;
  int (*box_rows)(int box);
  std::int64_t (*smem_bytes)(std::int64_t experts, bool with_row_info);
  RowGemmFunctions functions[2];  ///< bf16, fp16

  const void* function(const Problem& problem) const {
    const RowGemmFunctions& variants = functions[problem.dtype == DType::kFloat16];
    if (problem.gathers()) return variants.gathered;
    return problem.bias && variants.biased ? variants.biased : variants.in_order;
  }

  bool takes_bias_of(const Problem& problem) const {
    return adds_bias || function(problem) == functions[problem.dtype == DType::kFloat16].biased;
  }
};

template <Op O, RowLoads Loads, typename TileT>
CompiledRowGemm compiled() {
  return {O,
          TileT::kFeatures,
          TileT::kRows,
          TileT::kStages,
          TileT::kBoxes,
          TileT::kPingpong,
          TileT::kActivated,
          TileT::kActivated || TileT::kAddsBias,
          &TileT::box_rows,
          &RowGemmLayout<TileT>::total,
          {row_gemm_functions<O, TileT, Loads, DType::kBFloat16>(),
           row_gemm_functions<O, TileT, Loads, DType::kFloat16>()}};
}

const std::vector<CompiledRowGemm>& all_compiled() {
  static const std::vector<CompiledRowGemm> all = {
#define MOEGEMM_ROW_GEMM(op, features, rows, granule, stages, schedule, loads) \
  compiled<Op::op, RowLoads::loads, RowTile<features, rows, granule, stages, Schedule::schedule>>(),
#define MOEGEMM_ROW_GEMM_ACTIVATED(op, features, rows, granule, stages, schedule, loads) \
  compiled<Op::op, RowLoads::loads,                                                      \
           RowTile<features, rows, granule, stages, Schedule::schedule, true>>(),
#include "cuda/instances/sm90_rows.inc"
#undef MOEGEMM_ROW_GEMM
#undef MOEGEMM_ROW_GEMM_ACTIVATED
  };
  return all;
}

const ListedKernels listed(
    [] {
      std::vector<const void*> functions;
      for (const CompiledRowGemm& kernel : all_compiled()) {
        for (const RowGemmFunctions& variants : kernel.functions) {
          if (variants.in_order) functions.push_back(variants.in_order);
          if (variants.gathered) functions.push_back(variants.gathered);
          if (variants.biased) functions.push_back(variants.biased);
        }
      }
      return functions;
    },
    9, 9);

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

std::int64_t most_tiles(const CompiledRowGemm& kernel, const Problem& problem) {
  const std::int64_t features = row_problem(problem, {}).features;
  const std::int64_t row_tiles =
      std::min(problem.experts, problem.rows) + problem.rows / kernel.rows;
  return row_tiles * ((features + kernel.features - 1) / kernel.features);
}

LaunchPolicy policy(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const CompiledRowGemm& kernel = all_compiled()[entry.family_index];
  LaunchPolicy policy;
  policy.grid = static_cast<int>(
      std::clamp<std::int64_t>(most_tiles(kernel, problem), 1, facts.multiprocessors));
  if (weights_pass_through_l2(problem, entry.info.tile, facts.l2_bytes)) {
    policy.weights = WeightCaching::kPassThrough;
  }
  return policy;
}

std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const CompiledRowGemm& kernel = all_compiled()[entry.family_index];
  if (problem.op != kernel.op) return std::string("computes ") + to_string(kernel.op) + " only";
  if (!kernel.function(problem)) {
    return problem.gathers() ? "is not compiled for gathered rows"
                             : "is compiled for gathered rows only";
  }
  const std::int64_t depth = row_problem(problem, {}).depth;
  if (problem.gathers() && depth % 8 != 0) {
    return (problem.op == Op::kForward ? "K = " : "N = ") + std::to_string(depth) +
           " is not a multiple of 8, which gathered rows need";
  }
  // Tile numbers, and a block's overshoot of them, must fit 32 bits.
  if (most_tiles(kernel, problem) > std::numeric_limits<int>::max() / 2) {
    return "more than 2^30 output tiles";
  }
  const std::int64_t smem = kernel.smem_bytes(problem.experts, needs_row_info(problem));
  if (smem > facts.shared_memory_bytes) {
    return std::to_string(problem.experts) + " experts need " + std::to_string(smem) +
           " bytes of shared memory, a block has " + std::to_string(facts.shared_memory_bytes);
  }
  // Last: a problem that no kernel runs is told what is wrong with it, not what else there is.
  if (problem.activation && !kernel.activated) return "leaves the activation to a pass behind it";
  if (!problem.activation && kernel.activated) return "stores activated rows only";
  if (problem.bias && !kernel.takes_bias_of(problem)) return "adds no bias to gathered rows";
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
TensorMapSpec activated_weights(const CompiledRowGemm& kernel, const Problem& problem,
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

CUtensorMap weights_map(const CompiledRowGemm& kernel, const Problem& problem,
                        const Operands& operands) {
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

RowGemmParams make_params(const CompiledRowGemm& kernel, const Step& step, const Problem& problem,
                          const Operands& operands) {
  const RowProblem rows = row_problem(problem, operands);
  RowGemmParams params = {};
  params.weights_map = weights_map(kernel, problem, operands);
  params.weights_in_slabs = weights_in_slabs(problem);
  params.weights_pass_through = step.weights == WeightCaching::kPassThrough;
  if (!problem.gathers()) {
    for (int box = 0; box < kernel.boxes; ++box) {
      params.rows_maps[box] = rows_map(problem, rows, kernel.box_rows(box));
    }
  }
  params.rows = static_cast<const std::byte*>(rows.rows);
  params.row_bytes = rows.row_stride * size_bytes(problem.dtype);
  params.out = operands.out;
  params.out_stride = operands.out_stride;
  params.m_sizes = {operands.m_sizes, problem.sizes_dtype == DType::kInt64};
  params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
  params.topk_weights = operands.topk_weights;
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

void launch_entry(const KernelEntry& entry, const Step& step, const Problem& problem,
                  const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  const CompiledRowGemm& kernel = all_compiled()[entry.family_index];
  const DeviceFacts& facts = *device_facts(problem.device.index);
  RowGemmParams params = make_params(kernel, step, problem, operands);
  params.counter =
      acquire_tile_counter(problem.device.index, stream, most_tiles(kernel, problem), step.grid);
  const std::int64_t smem_bytes = kernel.smem_bytes(problem.experts, needs_row_info(problem));
  const int more_words =
      params.scatter
          ? static_cast<int>(std::min<std::int64_t>((facts.shared_memory_bytes - smem_bytes) / 4,
                                                    kMostNamedWords - kLeastNamedWords))
          : 0;
  params.named_words = kLeastNamedWords + more_words;
  LaunchSpec spec;
  spec.function = kernel.function(problem);
  spec.name = entry.info.name.c_str();
  spec.grid = dim3(static_cast<unsigned>(step.grid));
  spec.block = dim3((1 + kConsumers) * kWarpgroupThreads);
  spec.dynamic_smem_bytes = static_cast<int>(smem_bytes) + 4 * more_words;
  spec.device = problem.device.index;
  void* args[] = {&params};
  launch(spec, args, stream, step);
}

KernelEntry make_entry(const CompiledRowGemm& kernel, int index) {
  KernelEntry entry;
  entry.info.backend = BackendKind::kSm90;
  entry.info.name = std::string(kernel.op == Op::kForward ? "sm90_forward_" : "sm90_dx_") +
                    (kernel.activated ? "activated_" : "") + std::to_string(kernel.features) + "x" +
                    std::to_string(kernel.rows) + "_s" + std::to_string(kernel.stages) +
                    (kernel.pingpong ? "_pingpong" : "_coop");
  entry.info.op = kernel.op;
  entry.info.tile = {kernel.rows, kernel.features, kDepth};
  entry.info.stages = kernel.stages;
  entry.policy = policy;
  entry.refuse = refuse;
  entry.launch = launch_entry;
  entry.family_index = index;
  return entry;
}

}  // namespace

std::span<const KernelEntry> row_gemm_kernels() {
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> all;
    for (const CompiledRowGemm& kernel : all_compiled()) {
      all.push_back(make_entry(kernel, static_cast<int>(all.size())));
    }
    return all;
  }();
  return entries;
}

}  // namespace moegemm::cuda::sm90
