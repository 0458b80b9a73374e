#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/tile_counters.h"
#include "cuda/sm80/compiled_kernel.h"
#include "cuda/sm80/pitch.h"
#include "cuda/sm80/weight_gemm_params.h"

namespace moegemm::cuda::sm80 {
namespace {

WeightTiling make_tiling(const CompiledKernel& kernel, const Problem& problem) {
  const TileShape& tile = kernel.info.tile;
  const std::int64_t rows = problem.rows / std::max<std::int64_t>(problem.experts, 1);
  return {static_cast<int>((problem.n + tile.rows - 1) / tile.rows),
          static_cast<int>((problem.k + tile.cols - 1) / tile.cols),
          k_tiles_first(rows, problem.n, problem.k, size_bytes(problem.dtype),
                        device_facts(problem.device.index)->l2_bytes)};
}

WeightGemmParams make_params(const CompiledKernel& kernel, const Problem& problem,
                             const Operands& operands) {
  WeightGemmParams params = {};
  params.dy = static_cast<const std::byte*>(operands.dy);
  params.x = static_cast<const std::byte*>(operands.x);
  params.dy_bytes = pitch_bytes("dy", operands.dy_stride, problem.dtype);
  params.x_bytes = pitch_bytes("x", operands.x_stride, problem.dtype);
  params.out = {operands.out, operands.out_stride, static_cast<int>(problem.k),
                problem.out_dtype == DType::kFloat32, problem.accumulate};
  params.expert_stride = problem.n * operands.out_stride;
  params.n = static_cast<int>(problem.n);
  params.m_sizes = {operands.m_sizes, problem.sizes_dtype == DType::kInt64};
  params.gather_indices = {operands.gather_indices, problem.index_dtype == DType::kInt64};
  params.topk_weights = operands.topk_weights;
  params.tiling = make_tiling(kernel, problem);
  params.experts = static_cast<int>(problem.experts);
  params.total_rows = static_cast<int>(problem.rows);
  params.divisor = make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor()));
  params.gather_dy = problem.gathers_dy();
  params.gather_x = problem.gathers_x();
  params.multiply = problem.multiply;
  params.weights_are_fp32 = problem.weights_dtype == DType::kFloat32;
  return params;
}

}  // namespace

void launch_weights(const CompiledKernel& kernel, const Plan& plan, const Problem& problem,
                    const Operands& operands, cudaStream_t stream) {
  if (problem.experts == 0 || problem.n == 0 || problem.k == 0) return;
  WeightGemmParams params = make_params(kernel, problem, operands);
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
