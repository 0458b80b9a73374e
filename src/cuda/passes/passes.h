#pragma once

#include <cuda_runtime_api.h>

#include "core/backend.h"
#include "cuda/backend/device_facts.h"

namespace moegemm::cuda {

/// The memory-bound operations on a GPU.
class CudaPasses final : public Passes {
 public:
#define MOEGEMM_PASS_IS override
#include "core/passes.inc"
};

/// Where a pass is launched: makes the GPU of its tensors the current one while this lives.
struct PassLaunch {
  DeviceGuard guard;
  cudaStream_t stream;

  PassLaunch(Device device, const ExecutionContext& context)
      : guard(device.index), stream(static_cast<cudaStream_t>(context.stream)) {}
};

}  // namespace moegemm::cuda
