#include "cuda/sm80/plan/launch_kernel.h"
#include "cuda/sm80/plan/pitch.h"
#include "cuda/sm80/weight_gemm/params.h"

namespace moegemm::cuda::sm80 {
namespace {

WeightTiling make_tiling(const Step& step, const Problem& problem) {
  const TileShape& tile = step.tile;
  return {static_cast<int>((problem.n + tile.rows - 1) / tile.rows),
          static_cast<int>((problem.k + tile.cols - 1) / tile.cols),
          step.order == TileOrder::kAlongColumns};
}

WeightGemmParams make_params(const Step& step, const Problem& problem, const Operands& operands) {
  WeightGemmParams params = {};
  static_cast<RoutingParams&>(params) = make_routing(problem, operands);
  params.dy = static_cast<const std::byte*>(operands.dy);
  params.x = static_cast<const std::byte*>(operands.x);
  params.dy_pitch = row_pitch("dy", operands.dy_stride, problem.dtype);
  params.x_pitch = row_pitch("x", operands.x_stride, problem.dtype);
  params.out = {operands.out, operands.out_stride, static_cast<int>(problem.k),
                problem.out_dtype == DType::kFloat32, problem.accumulate};
  params.expert_stride = problem.n * operands.out_stride;
  params.n = static_cast<int>(problem.n);
  params.tiling = make_tiling(step, problem);
  params.indexed = problem.permutation != Permutation::kNone;
  params.gather_dy = problem.gathers_dy();
  params.gather_x = problem.gathers_x();
  return params;
}

}  // namespace

void launch_weights(const CompiledKernel& kernel, const Step& step, const Problem& problem,
                    const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  WeightGemmParams params = make_params(step, problem, operands);
  launch_kernel(kernel, step, problem, params, &params, stream);
}

}  // namespace moegemm::cuda::sm80
