#include <algorithm>
#include <vector>

#include "cuda/backend/empty_output.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/row_gemm/params.h"
#include "cuda/sm80/row_gemm/traits.h"

namespace moegemm::cuda::sm80 {
namespace {

void add_low_rank(const KernelEntry& entry, const Problem& problem, const Operands& operands,
                  RowGemmParams& params) {
  const Operands low = operands.low_rank_part();
  const std::int64_t element_bytes = size_bytes(problem.dtype);
  params.low_rows = static_cast<const std::byte*>(low.x);
  params.low_row_bytes = low.x_stride * element_bytes;
  params.low_weights = static_cast<const std::byte*>(low.w);
  params.low_weight_bytes = low.w_stride * element_bytes;
  params.low_expert_bytes = low_rank_part(problem).n * params.low_weight_bytes;
  params.low_rank = static_cast<int>(problem.low_rank);
  params.low_blocks = (params.low_rank + entry.info.tile.depth - 1) / entry.info.tile.depth;
}

RowGemmParams make_params(const Step& step, const Problem& problem, const Operands& operands) {
  const std::int64_t element_bytes = size_bytes(problem.dtype);
  const bool forward = problem.op == Op::kForward;
  RowGemmParams params = {};
  static_cast<RoutingParams&>(params) = make_routing(problem, operands);
  params.rows = static_cast<const std::byte*>(forward ? operands.x : operands.dy);
  params.row_pitch = forward ? row_pitch("x", operands.x_stride, problem.dtype)
                             : row_pitch("dy", operands.dy_stride, problem.dtype);
  params.weights = static_cast<const std::byte*>(operands.w);
  params.weight_bytes = operands.w_stride * element_bytes;
  params.expert_bytes = problem.n * params.weight_bytes;
  params.out = {operands.out, operands.out_stride,
                static_cast<int>(forward ? problem.n : problem.k),
                problem.out_dtype == DType::kFloat32, false};
  params.bias = operands.bias;
  params.bias_stride = operands.bias_stride;
  params.depth = static_cast<int>(forward ? problem.k : problem.n);
  params.gather = problem.gathers();
  params.scatter = problem.scatters();
  params.full_first = step.order == TileOrder::kFullTilesFirst;
  return params;
}

void launch_rows(const KernelEntry& entry, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  RowGemmParams params = make_params(step, problem, operands);
  if (problem.low_rank > 0) add_low_rank(entry, problem, operands, params);
  launch_kernel(entry, step, problem, params, entry.smem_bytes(problem), stream);
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

template <RowGemm Kernel>
KernelEntry row_entry() {
  KernelEntry entry = entry_of<Kernel, RowGemmLayout<ShapeOf<Kernel>>>(Functions<Kernel>());
  entry.tiles = most_row_tiles;
  entry.grid = grid;
  entry.launch = launch_rows;
  return entry;
}

}  // namespace

std::vector<KernelEntry> row_gemm_kernels() {
  return {
#define MOEGEMM_ROW_GEMM(...) row_entry<RowGemm{__VA_ARGS__}>(),
#include "cuda/instances/sm80.inc"
  };
}

}  // namespace moegemm::cuda::sm80
