#include "cuda/host/launch.h"
#include "cuda/host/tile_counters.h"
#include "cuda/sm80/compiled_kernel.h"
#include "cuda/sm80/pitch.h"
#include "cuda/sm80/row_gemm_params.h"

namespace moegemm::cuda::sm80 {
namespace {

RowGemmParams make_params(const Problem& problem, const Operands& operands) {
  const std::int64_t element_bytes = size_bytes(problem.dtype);
  const bool forward = problem.op == Op::kForward;
  RowGemmParams params = {};
  params.rows = static_cast<const std::byte*>(forward ? operands.x : operands.dy);
  params.row_bytes = forward ? pitch_bytes("x", operands.x_stride, problem.dtype)
                             : pitch_bytes("dy", operands.dy_stride, problem.dtype);
  params.weights = static_cast<const std::byte*>(operands.w);
  params.weight_bytes = operands.w_stride * element_bytes;
  params.expert_bytes = problem.n * params.weight_bytes;
  params.out = {operands.out, operands.out_stride,
                static_cast<int>(forward ? problem.n : problem.k),
                problem.out_dtype == DType::kFloat32, false};
  params.m_sizes = {operands.m_sizes, problem.sizes_dtype == DType::kInt64};
  params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
  params.topk_weights = operands.topk_weights;
  params.experts = static_cast<int>(problem.experts);
  params.total_rows = static_cast<int>(problem.rows);
  params.depth = static_cast<int>(forward ? problem.k : problem.n);
  params.divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  params.gather = problem.gathers();
  params.scatter = problem.scatters();
  params.multiply = problem.multiply;
  params.weights_are_fp32 = problem.weights_dtype == DType::kFloat32;
  return params;
}

}  // namespace

void launch_rows(const CompiledKernel& kernel, const Plan& plan, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) {
  if (problem.rows == 0) return;
  RowGemmParams params = make_params(problem, operands);
  params.counter = acquire_tile_counter(problem.device.index, stream);
  LaunchSpec spec;
  spec.function = kernel.function(problem.dtype);
  spec.name = kernel.info.name.c_str();
  spec.grid = dim3(static_cast<unsigned>(plan.grid));
  spec.block = dim3(static_cast<unsigned>(kernel.threads));
  spec.dynamic_smem_bytes = kernel.smem_bytes(static_cast<int>(problem.experts));
  void* args[] = {&params};
  launch(spec, args, stream, plan);
}

}  // namespace moegemm::cuda::sm80
