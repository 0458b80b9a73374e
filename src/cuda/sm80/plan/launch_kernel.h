#pragma once

#include "cuda/sm80/plan/compiled_kernel.h"
#include "cuda/sm80/tile/params.h"

namespace moegemm::cuda::sm80 {

RoutingParams make_routing(const Problem& problem, const Operands& operands);

/// Launches the kernel with `params`, a struct that starts with RoutingParams `routing`, whose tile
/// counter is set here.
void launch_kernel(const CompiledKernel& kernel, const Step& step, const Problem& problem,
                   RoutingParams& routing, void* params, cudaStream_t stream);

}  // namespace moegemm::cuda::sm80
