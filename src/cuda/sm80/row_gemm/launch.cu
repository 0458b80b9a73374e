#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "cuda/backend/launch/empty_output.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/row_gemm/params.h"
#include "cuda/sm80/row_gemm/traits.h"

namespace moegemm::cuda::sm80 {
namespace {

void add_low_rank(const Problem& problem, const Operands& operands, RowGemmParams& params) {
  const Operands low = operands.low_rank_part();
  const std::int64_t element_bytes = size_bytes(problem.dtype);
  params.low_rows = static_cast<const std::byte*>(low.x);
  params.low_row_bytes = low.x_stride * element_bytes;
  params.low_weights = static_cast<const std::byte*>(low.w);
  params.low_weight_bytes = low.w_stride * element_bytes;
  params.low_expert_bytes = low_rank_part(problem).n * params.low_weight_bytes;
  params.low_rank = static_cast<int>(problem.low_rank);
}

/// Blocks that reach past the end of W have one scale there.
int block_shift(std::int64_t block, std::int64_t extent) {
  return block >= extent && block > 1 ? 31 : std::countr_zero(static_cast<std::uint64_t>(block));
}

/// nf4's blocks do not cross rows here, so that they are those of a row like the others.
WeightScales make_scales(const Problem& problem, const Operands& operands) {
  const Quantization& quantization = problem.quantization;
  const auto size = static_cast<unsigned>(scale_bytes(quantization.scale_type));
  const std::int64_t expert_bytes = quantization.expert_scales(problem.n, problem.k) * size;
  const auto* data = static_cast<const std::byte*>(operands.w_scales);
  return {.data = data,
          .end = data + problem.experts * expert_bytes,
          .expert_bytes = expert_bytes,
          .row_bytes = (problem.k + quantization.block_k - 1) / quantization.block_k * size,
          .row_shift = block_shift(quantization.block_n, problem.n),
          .column_shift = block_shift(quantization.block_k, problem.k),
          .size_shift = std::countr_zero(size),
          .format = quantization.format,
          .type = quantization.scale_type};
}

}  // namespace

RowGemmParams make_row_params(const Problem& problem, const Operands& operands) {
  const std::int64_t element_bytes = size_bytes(problem.dtype);
  const bool forward = problem.op == Op::kForward;
  RowGemmParams params = {};
  static_cast<RoutingParams&>(params) = make_routing(problem, operands);
  params.rows = static_cast<const std::byte*>(forward ? operands.x : operands.dy);
  params.row_pitch = row_pitch(forward ? operands.x_stride : operands.dy_stride, problem.dtype);
  params.weights = static_cast<const std::byte*>(operands.w);
  if (problem.quantization.plain()) {
    params.weight_bytes = operands.w_stride * element_bytes;
  } else {
    params.weight_bytes = problem.k * problem.quantization.bits() / 8;
    params.scales = make_scales(problem, operands);
  }
  params.expert_bytes = problem.n * params.weight_bytes;
  params.out = {operands.out, operands.out_stride,
                static_cast<int>(forward ? problem.n : problem.k),
                problem.out_dtype == DType::kFloat32, false};
  params.bias = operands.bias;
  params.bias_stride = operands.bias_stride;
  params.depth = static_cast<int>(forward ? problem.k : problem.n);
  params.gather = problem.gathers();
  params.scatter = problem.scatters();
  if (problem.low_rank > 0) add_low_rank(problem, operands, params);
  return params;
}

namespace {

void launch_rows(const KernelEntry& entry, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  RowGemmParams params = make_row_params(problem, operands);
  params.full_first = step.order == TileOrder::kFullTilesFirst;
  params.low_blocks = (params.low_rank + entry.info.tile.depth - 1) / entry.info.tile.depth;
  launch_kernel(entry, step, problem, params, stream);
}

LaunchPolicy grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts) {
  const std::int64_t rows = problem.planned_rows() / std::max<std::int64_t>(problem.experts, 1);
  const std::int64_t depth = problem.op == Op::kForward ? problem.k : problem.n;
  const bool full_first = full_tiles_first(rows, depth, size_bytes(problem.dtype), facts.l2_bytes);
  return {.grid = persistent_grid(entry, problem, facts),
          .order = full_first ? TileOrder::kFullTilesFirst : TileOrder::kByExpert};
}

template <RowGemm Kernel>
struct Functions {
  template <DType D>
  KernelFunctions operator()() const {
    return row_gemm_functions<Kernel, D>();
  }
};

/// The entry of a line; one that decodes every format has one for each.
template <RowGemm Kernel>
void list_kernel(std::vector<KernelEntry>& kernels) {
  KernelEntry entry = entry_of<Kernel, RowGemmLayout<ShapeOf<Kernel>>>(Functions<Kernel>());
  entry.tiles = most_row_tiles;
  entry.grid = grid;
  entry.launch = launch_rows;
  if constexpr (Kernel.quantised) {
    for (const WeightFormatInfo& format : kWeightFormats) {
      kernels.push_back(entry);
      kernels.back().info.weights = format.value;
      kernels.back().info.name += std::string("_") + format.name;
    }
  } else {
    kernels.push_back(std::move(entry));
  }
}

}  // namespace

std::vector<KernelEntry> row_gemm_kernels() {
  std::vector<KernelEntry> kernels;
#define MOEGEMM_ROW_GEMM(...) list_kernel<RowGemm{__VA_ARGS__}>(kernels);
#include "cuda/instances/sm80.inc"
  return kernels;
}

}  // namespace moegemm::cuda::sm80
