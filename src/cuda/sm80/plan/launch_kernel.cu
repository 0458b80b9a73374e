#include "cuda/host/launch.h"
#include "cuda/host/tile_counters.h"
#include "cuda/sm80/plan/launch_kernel.h"

namespace moegemm::cuda::sm80 {

RoutingParams make_routing(const Problem& problem, const Operands& operands) {
  return {.m_sizes = {operands.m_sizes, problem.sizes_dtype == DType::kInt64},
          .gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64},
          .topk_weights = operands.topk_weights,
          .counter = nullptr,
          .experts = static_cast<int>(problem.experts),
          .total_rows = static_cast<int>(problem.rows),
          .flat_rows = static_cast<int>(problem.flat_rows()),
          .divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor())),
          .multiply = problem.multiply,
          .weights_are_fp32 = problem.weights_dtype == DType::kFloat32};
}

void launch_kernel(const CompiledKernel& kernel, const Step& step, const Problem& problem,
                   RoutingParams& routing, void* params, cudaStream_t stream) {
  routing.counter =
      acquire_tile_counter(problem.device.index, stream, most_tiles(kernel, problem), step.grid);
  LaunchSpec spec;
  spec.function = kernel.function(problem.dtype);
  spec.name = kernel.info.name.c_str();
  spec.grid = dim3(static_cast<unsigned>(step.grid));
  spec.block = dim3(static_cast<unsigned>(kernel.threads));
  spec.dynamic_smem_bytes = static_cast<int>(kernel.smem_bytes(problem.experts));
  spec.device = problem.device.index;
  void* args[] = {params};
  launch(spec, args, stream, step);
}

}  // namespace moegemm::cuda::sm80
