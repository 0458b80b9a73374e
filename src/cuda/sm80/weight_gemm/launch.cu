#include <vector>

#include "cuda/sm80/kernels.h"
#include "cuda/sm80/weight_gemm/params.h"
#include "cuda/sm80/weight_gemm/traits.h"

namespace moegemm::cuda::sm80 {
namespace {

WeightTiling make_tiling(const TileShape& tile, const Problem& problem, TileOrder order) {
  return {static_cast<int>((problem.n + tile.rows - 1) / tile.rows),
          static_cast<int>((problem.k + tile.columns - 1) / tile.columns),
          order == TileOrder::kAlongColumns};
}

std::int64_t total_tiles(const KernelInfo& info, const Problem& problem) {
  const WeightTiling tiling = make_tiling(info.tile, problem, TileOrder::kAlongColumns);
  return problem.experts * tiling.a_tiles * tiling.b_tiles;
}

WeightGemmParams make_params(const Step& step, const Problem& problem, const Operands& operands) {
  WeightGemmParams params = {};
  static_cast<RoutingParams&>(params) = make_routing(problem, operands);
  params.dy = static_cast<const std::byte*>(operands.dy);
  params.x = static_cast<const std::byte*>(operands.x);
  params.dy_pitch = row_pitch(operands.dy_stride, problem.dtype);
  params.x_pitch = row_pitch(operands.x_stride, problem.dtype);
  params.out = {operands.out, operands.out_stride, static_cast<int>(problem.k),
                problem.out_dtype == DType::kFloat32, problem.accumulate};
  params.expert_stride = problem.n * operands.out_stride;
  params.n = static_cast<int>(problem.n);
  params.tiling = make_tiling(step.tile, problem, step.order);
  params.indexed = problem.permutation != Permutation::kNone;
  params.gather_dy = problem.gathers_dy();
  params.gather_x = problem.gathers_x();
  return params;
}

void launch_weights(const KernelEntry& entry, const Step& step, const Problem& problem,
                    const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  WeightGemmParams params = make_params(step, problem, operands);
  launch_kernel(entry, step, problem, params, stream);
}

template <WeightGemm Kernel>
struct Functions {
  template <DType D>
  KernelFunctions operator()() const {
    return weight_gemm_functions<Kernel, D>();
  }
};

template <WeightGemm Kernel>
KernelEntry weight_entry() {
  using Layout = WeightGemmLayout<ShapeOf<Kernel>, Kernel.element_bytes()>;
  KernelEntry entry = entry_of<Kernel, Layout>(Functions<Kernel>());
  entry.tiles = total_tiles;
  entry.grid = weight_launch_policy;
  entry.launch = launch_weights;
  return entry;
}

}  // namespace

std::vector<KernelEntry> weight_gemm_kernels() {
  return {
#define MOEGEMM_WEIGHT_GEMM(...) weight_entry<WeightGemm{__VA_ARGS__}>(),
#include "cuda/instances/sm80.inc"
  };
}

}  // namespace moegemm::cuda::sm80
