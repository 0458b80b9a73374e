#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/backend/kernel_entry.h"
#include "cuda/backend/launch/empty_output.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/backend/launch/tensor_map.h"
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

/// Tiles of 64 features and many rows are for thin products: of wide ones they would read every row
/// too often.
constexpr int kThinFeatures = 64;
constexpr std::int64_t kMostThinColumns = 4 * kThinFeatures;

bool needs_row_info(const Problem& problem) { return problem.scatters() || problem.multiply; }

/// What a block does before it reads overlaps with the end of the launch ahead. Not where
/// multiprocessors are left to others: blocks that wait would take those. Only streaming tiles
/// begin with their weights: the loop of the others has no time to ask which have come.
LaunchStart start_of(const RowGemm& kernel, const Problem& problem) {
  if (problem.max_multiprocessors > 0) return LaunchStart::kAfter;
  const bool weights_first = kernel.streams() && problem.rows_pending && !problem.gathers();
  return weights_first ? LaunchStart::kWithWeights : LaunchStart::kEarly;
}

/// Of a block that stores rows in flat order, as much memory as there is: so many more of them can
/// it look for at once (see UnnamedRows).
std::int64_t smem_bytes_of(const KernelEntry& entry, const Problem& problem,
                           const DeviceFacts& facts) {
  const std::int64_t needed = entry.smem_bytes(problem);
  if (!problem.scatters()) return needed;
  const std::int64_t left = facts.shared_memory_bytes - needed;
  return needed + 4 * std::min<std::int64_t>(left / 4, kMostNamedWords - kLeastNamedWords);
}

template <RowGemm Kernel>
LaunchPolicy grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const bool pass = problem.quantization.plain() && !Kernel.tf32 &&
                    weights_pass_through_l2(problem, entry.info.tile, facts.l2_bytes);
  return {.grid = persistent_grid(entry, problem, facts),
          .smem_bytes = smem_bytes_of(entry, problem, facts),
          .weights = pass ? WeightCaching::kPassThrough : WeightCaching::kKeep,
          .start = start_of(Kernel, problem)};
}

/// What the decoders need of a quantised W.
std::string refuse_quantised(const RowGemm& kernel, const Problem& problem) {
  const Quantization& q = problem.quantization;
  if (problem.dtype != DType::kBFloat16) return "decodes W to bf16 only";
  if (problem.k % 64 != 0) {
    return "K = " + std::to_string(problem.k) + " is not a multiple of 64, the decoder's step";
  }
  if (problem.packed_alignment < 16) {
    return "W's packed rows must be multiples of 16 bytes, at such an address (TMA)";
  }
  if (problem.scales_alignment < scale_bytes(q.scale_type)) {
    return "W's scales are not at a multiple of their size";
  }
  const bool pairs = q.format == WeightFormat::kMxfp4 || q.format == WeightFormat::kInt4;
  if (pairs && !kernel.streams() && q.block_k == 32 &&
      problem.scales_alignment < 2 * scale_bytes(q.scale_type)) {
    return "takes two scales of W at a time, which are not at a multiple of their size";
  }
  const auto serves = [](std::int64_t block, std::int64_t all, std::int64_t least) {
    return block >= all ||
           (block >= least && std::has_single_bit(static_cast<std::uint64_t>(block)));
  };
  if (!serves(q.block_n, problem.n, 1) || !serves(q.block_k, problem.k, 32) ||
      (q.format == WeightFormat::kNf4 && problem.k % q.block_k != 0)) {
    return "decodes no blocks of " + std::to_string(q.block_n) + " x " + std::to_string(q.block_k) +
           " in rows of " + std::to_string(problem.k);
  }
  if (q.format == WeightFormat::kNf4 && kernel.op == Op::kForward && !kernel.streams() &&
      q.block_k < kDepth) {
    return "decodes nf4 blocks of " + std::to_string(kDepth) + " weights or more, not of " +
           std::to_string(q.block_k);
  }
  if (q.format == WeightFormat::kInt4 && q.scale_type != ScaleType::kBFloat16) {
    return "decodes int4 with bf16 scales only";
  }
  return {};
}

std::string refuse(const RowGemm& kernel, const KernelEntry& entry, const Problem& problem,
                   const DeviceFacts& facts) {
  if (std::string reason = refuse_operands(problem, kernel.tf32); !reason.empty()) return reason;
  if (kernel.quantised()) {
    if (std::string reason = refuse_quantised(kernel, problem); !reason.empty()) return reason;
  }
  if (!entry.function(problem)) {
    return problem.gathers() ? "is not compiled for gathered rows"
                             : "is compiled for gathered rows only";
  }
  const std::int64_t depth = row_problem(problem, {}).depth;
  const int chunk = kernel.tf32 ? 4 : 8;  // elements of 16 bytes
  if (problem.gathers() && depth % chunk != 0) {
    return (problem.op == Op::kForward ? "K = " : "N = ") + std::to_string(depth) +
           " is not a multiple of " + std::to_string(chunk) + ", which gathered rows need";
  }
  if (kernel.tf32 && problem.gathers() && problem.far_rows) {
    return "gathers from at most 64 GiB, the permuted operand spans more";
  }
  if (std::string reason = refuse_size(entry, problem, facts); !reason.empty()) return reason;
  // Last: a problem that no kernel runs is told what is wrong with it, not what else there is.
  if (problem.activation && !kernel.activated) return "leaves the activation to a pass after it";
  if (!problem.activation && kernel.activated) return "stores activated rows only";
  if (problem.bias && problem.gathers() && !kernel.activated && !kernel.adds_bias()) {
    return "adds no bias to gathered rows";
  }
  if (kernel.activated && problem.out_dtype == DType::kFloat32) {
    return "stores activated rows in the dtype of the inputs only";
  }
  const std::int64_t columns = row_problem(problem, {}).features;
  if (kernel.features <= kThinFeatures && !kernel.streams() && columns > kMostThinColumns) {
    return "is for up to " + std::to_string(kMostThinColumns) + " columns, these are " +
           std::to_string(columns);
  }
  return {};
}

/// dX reads W in slabs of 128 bytes of columns. Where they do not divide K, the last one would
/// reach past a row. Forward of TF32 orders the features of each 32: likewise.
bool weights_in_slabs(const RowGemm& kernel, const Problem& problem) {
  if (problem.op == Op::kDx) return problem.k % kernel.panel_depth() != 0;
  return kernel.tf32 && problem.n % 32 != 0;
}

/// TF32 is what the copy engine rounds operands to.
CUtensorMap encode_operand(const RowGemm& kernel, TensorMapSpec spec) {
  spec.rounds_to_tf32 = kernel.tf32;
  return encode(spec);
}

CUtensorMapSwizzle swizzle_of(std::int64_t row_bytes) {
  return row_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_128B;
}

/// Packed values, in units of 16 bits.
TensorMapSpec packed_spec(const RowGemm& kernel, const Problem& problem, const Operands& operands) {
  const std::int64_t bits = kernel.weight_bits();
  const std::int64_t pitch = problem.k * bits / 8;
  const bool forward = problem.op == Op::kForward;
  const std::int64_t columns = forward ? kDepth * kernel.panels() : kernel.features;
  TensorMapSpec spec = tensor_spec(
      operands.w, DType::kBFloat16, {problem.k * bits / 16, problem.n, problem.experts},
      {pitch, pitch * problem.n}, {columns * bits / 16, forward ? kernel.features : kDepth, 1});
  spec.swizzle = swizzle_of(columns * bits / 8);
  return spec;
}

WeightScales weight_scales(const Problem& problem, const Operands& operands) {
  const Quantization& q = problem.quantization;
  const auto shift = [](std::int64_t block, std::int64_t all) {
    return block >= all ? 31 : std::countr_zero(static_cast<std::uint64_t>(block));
  };
  return {.data = static_cast<const std::byte*>(operands.w_scales),
          .expert_scales = q.expert_scales(problem.n, problem.k),
          .row_scales = static_cast<int>((problem.k + q.block_k - 1) / q.block_k),
          .row_shift = shift(q.block_n, problem.n),
          .column_shift = shift(q.block_k, problem.k),
          .type = q.scale_type,
          .bytes = scale_bytes(q.scale_type)};
}

/// Activated tiles: gates and ups are a dimension of their own, so that one box holds half of the
/// tile's features of each.
TensorMapSpec weights_spec(const RowGemm& kernel, const Problem& problem, const Operands& operands,
                           int depth) {
  const std::int64_t n = problem.n, k = problem.k, experts = problem.experts;
  const std::int64_t pitch = operands.w_stride * size_bytes(problem.dtype);
  if (kernel.activated) {
    const std::int64_t parts = problem.activation->gated() ? 2 : 1;
    const bool interleaved = problem.activation->layout == GateLayout::kInterleaved;
    const std::int64_t half = pitch * (n / parts);
    if (problem.ups_apart) {  // the ups lie after the gates: that far is a stride like any other
      const auto* gates = static_cast<const std::byte*>(operands.w);
      const std::int64_t distance = static_cast<const std::byte*>(operands.w_up) - gates;
      return tensor_spec(gates, problem.dtype, {k, n / parts, parts, experts},
                         {pitch, distance, half}, {kDepth, kernel.features / parts, parts, 1});
    }
    return tensor_spec(operands.w, problem.dtype, {k, n / parts, parts, experts},
                       {interleaved ? 2 * pitch : pitch, interleaved ? pitch : half, pitch * n},
                       {kDepth, kernel.features / parts, parts, 1});
  }
  const bool in_slabs = weights_in_slabs(kernel, problem);
  if (kernel.tf32 && problem.op == Op::kForward && !in_slabs) {
    return tensor_spec(operands.w, problem.dtype, {k, 8, 4, n / 32, experts},
                       {4 * pitch, pitch, 32 * pitch, pitch * n},
                       {depth, 8, 4, kernel.features / 32, 1});
  }
  const int slab = kernel.panel_depth();
  if (problem.op == Op::kForward || in_slabs) {
    const int features = problem.op == Op::kForward ? kernel.features : slab;
    return tensor_spec(operands.w, problem.dtype, {k, n, experts}, {pitch, pitch * n},
                       {depth, features, 1});
  }
  return tensor_spec(operands.w, problem.dtype, {slab, n, k / slab, experts},
                     {pitch, kRowBytes, pitch * n}, {slab, depth, kernel.features / slab, 1});
}

/// The low-rank part in stages of `depth`.
void add_low_rank(const RowGemm& kernel, const Problem& problem, const Operands& low,
                  RowGemmParams& params) {
  const int depth = kernel.quantised() ? 16 : kernel.panel_depth();
  TensorMapSpec weights = weights_spec(kernel, low_rank_part(problem), low, depth);
  TensorMapSpec rows =
      tensor_spec(low.x, problem.dtype, {problem.low_rank, problem.rows},
                  {low.x_stride * size_bytes(problem.dtype)}, {depth, kernel.rows});
  rows.swizzle = swizzle_of(depth * size_bytes(problem.dtype));
  if (problem.op == Op::kForward) weights.swizzle = rows.swizzle;
  params.low_weights_map = encode_operand(kernel, weights);
  params.low_rows_map = encode_operand(kernel, rows);
}

RowGemmParams make_params(const RowGemm& kernel, const Step& step, const Problem& problem,
                          const Operands& operands) {
  const RowProblem rows = row_problem(problem, operands);
  RowGemmParams params = {};
  static_cast<SegmentParams&>(params) = segment_params(problem, operands);
  params.rows = static_cast<const std::byte*>(rows.rows);
  params.row_bytes = rows.row_stride * size_bytes(problem.dtype);
  params.weights_map = encode_operand(
      kernel, kernel.quantised() ? packed_spec(kernel, problem, operands)
                                 : weights_spec(kernel, problem, operands, kernel.panel_depth()));
  if (kernel.quantised()) params.scales = weight_scales(problem, operands);
  params.rows_pending = step.start == LaunchStart::kWithWeights;
  params.weights_in_slabs = weights_in_slabs(kernel, problem);
  params.weights_pass_through = step.weights == WeightCaching::kPassThrough;
  if (!problem.gathers()) {
    for (int box = 0; box < kernel.boxes(); ++box) {
      params.rows_maps[box] = encode_operand(
          kernel, tensor_spec(rows.rows, problem.dtype, {rows.depth, problem.rows},
                              {params.row_bytes}, {kernel.panel_depth(), kernel.box_rows(box)}));
    }
  }
  if (problem.low_rank > 0) add_low_rank(kernel, problem, operands.low_rank_part(), params);
  params.out = operands.out;
  params.out_stride = operands.out_stride;
  params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
  params.router_weights = operands.router_weights;
  params.bias = operands.bias;
  params.bias_stride = operands.bias_stride;
  params.flat_rows = static_cast<int>(problem.flat_rows());
  params.features = static_cast<int>(rows.features);
  params.depth = static_cast<int>(rows.depth);
  params.low_rank = static_cast<int>(problem.low_rank);
  params.blocks = ceil_div(params.depth, kernel.panel_depth()) +
                  ceil_div(params.low_rank, kernel.panel_depth());
  params.divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  params.scatter = problem.scatters();
  params.multiply = problem.multiply;
  params.weights_are_fp32 = problem.weights_dtype == DType::kFloat32;
  params.out_is_fp32 = problem.out_dtype == DType::kFloat32;
  params.rounds = !params.out_is_fp32;
  params.vector_store =
      problem.output_alignment >= 16 && problem.output_columns() % (kernel.tf32 ? 4 : 8) == 0;
  params.stores_later = kernel.quantised() && !kernel.streams() && params.rounds &&
                        params.vector_store && !params.scatter && !params.multiply;
  if (params.stores_later) {
    const std::int64_t pitch = params.out_stride * size_bytes(problem.out_dtype);
    params.out_map =
        encode(tensor_spec(operands.out, problem.out_dtype, {rows.features, problem.rows, 1},
                           {pitch, pitch * problem.rows}, {64, kStagedRows, 1}));
  }
  if (kernel.activated) {
    const bool interleaved = problem.activation->layout == GateLayout::kInterleaved;
    params.activation = *problem.activation;
    params.columns = static_cast<int>(problem.output_columns());
    params.bias_step = interleaved ? 2 : 1;
    params.first_up = !params.activation.gated() ? 0 : (interleaved ? 1 : params.columns);
  }
  return params;
}

/// Of shared memory, the last that a block has: see SegmentShifts.
std::int64_t shift_bytes(const Problem& problem) {
  return problem.segments == Segments::kPacked ? 0 : 4 * problem.experts;
}

/// `starts` is where the segments' starts are in shared memory.
void launch_rows(const RowGemm& kernel, const KernelEntry& entry, const Step& step,
                 const Problem& problem, const Operands& operands, int starts,
                 cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  RowGemmParams params = make_params(kernel, step, problem, operands);
  const std::int64_t more_bytes = step.smem_bytes - entry.smem_bytes(problem);
  params.named_words = kLeastNamedWords + static_cast<int>(more_bytes / 4);
  const std::int64_t shifts = shift_bytes(problem);
  params.shifts = shifts == 0 ? SegmentShifts{starts, 0}
                              : SegmentShifts{static_cast<int>(step.smem_bytes - shifts), -1};
  launch_kernel(entry, step, problem, params, stream);
}

std::string name_of(const RowGemm& kernel) {
  return std::string(kernel.op == Op::kForward ? "sm90_forward_" : "sm90_dx_") +
         (kernel.activated ? "activated_" : "") +
         (kernel.quantised() ? to_string(kernel.weights) + std::string("_") : "") +
         (kernel.tf32 ? "tf32_" : "") + std::to_string(kernel.features) + "x" +
         std::to_string(kernel.rows) + "_s" + std::to_string(kernel.stages) +
         (kernel.pingpong() ? "_pingpong" : "_coop");
}

template <RowGemm Kernel>
struct Functions {
  template <DType D>
  KernelFunctions operator()() const {
    if constexpr (Kernel.tf32) {
      return tf32_gemm_functions<Kernel, D>();
    } else if constexpr (!Kernel.quantised()) {
      return row_gemm_functions<Kernel, D>();
    } else if constexpr (D == DType::kBFloat16) {
      return quantised_gemm_functions<Kernel, D>();
    } else {
      return {};
    }
  }
};

template <RowGemm Kernel>
const void* function(const Problem& problem) {
  const KernelFunctions functions =
      with_format(FormatsOf<Kernel.tf32>(), problem.dtype, Functions<Kernel>());
  if (problem.gathers()) return functions.gathered;
  return problem.bias && functions.biased ? functions.biased : functions.plain;
}

template <RowGemm Kernel>
KernelEntry entry_of() {
  constexpr DType kAny = Kernel.tf32 ? DType::kFloat32 : DType::kBFloat16;
  using Layout = RowGemmLayout<RowGemmTraits<Kernel, kAny, false>>;
  return {.info = {.backend = BackendKind::kSm90,
                   .name = name_of(Kernel),
                   .op = Kernel.op,
                   .tile = {Kernel.rows, Kernel.features, Kernel.panel_depth()},
                   .stages = Kernel.stages,
                   .weights = Kernel.weights,
                   .ups_apart = Kernel.activated},
          .arch = Kernel.arch,
          .exact = Kernel.exact,
          .threads = kThreads,
          .tiles = most_row_tiles,
          .smem_bytes =
              [](const Problem& problem) {
                return Layout::total(problem.experts, needs_row_info(problem)) +
                       shift_bytes(problem);
              },
          .function = function<Kernel>,
          .layer_functions = layer_functions_of<Kernel.tf32>(Functions<Kernel>()),
          .refuse = [](const KernelEntry& entry, const Problem& problem,
                       const DeviceFacts& facts) { return refuse(Kernel, entry, problem, facts); },
          .grid = grid<Kernel>,
          .launch =
              [](const KernelEntry& entry, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) {
                launch_rows(Kernel, entry, step, problem, operands, Layout::kStarts, stream);
              }};
}

}  // namespace

std::vector<KernelEntry> row_gemm_kernels() {
  return {
#define MOEGEMM_ROW_GEMM(...) entry_of<RowGemm{__VA_ARGS__}>(),
#define MOEGEMM_QUANTISED_GEMM(...) entry_of<QuantisedGemm{__VA_ARGS__}>(),
#define MOEGEMM_TF32_GEMM(...) entry_of<Tf32Gemm{__VA_ARGS__}>(),
#include "cuda/instances/sm90.inc"
  };
}

}  // namespace moegemm::cuda::sm90
