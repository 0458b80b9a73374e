#include "cuda/host/empty_output.h"
#include "cuda/sm80/plan/launch_kernel.h"
#include "cuda/sm80/plan/pitch.h"
#include "cuda/sm80/row_gemm/params.h"

namespace moegemm::cuda::sm80 {
namespace {

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

}  // namespace

void launch_rows(const CompiledKernel& kernel, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return zero_unnamed_output(problem, operands, stream);
  RowGemmParams params = make_params(step, problem, operands);
  launch_kernel(kernel, step, problem, params, &params, stream);
}

}  // namespace moegemm::cuda::sm80
