#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "moegemm/plan.h"

namespace moegemm::cuda {

struct LaunchSpec {
  const void* function = nullptr;  ///< the __global__ function
  const char* name = "";           ///< for error messages
  dim3 grid;
  dim3 block;
  int dynamic_smem_bytes = 0;
  /// Begin before the launch ahead on the stream has ended (programmatic dependent launch), where
  /// the GPU can: the kernel calls griddepcontrol_wait.
  bool early = false;
  int device = -1;  ///< the current one, where the caller knows it; otherwise it is asked for
};

/// Launches on the current device, which must be the stream's. `args` points to the kernel's
/// parameters in order. The first launch of a function on a device loads it and raises its dynamic
/// shared-memory limit to all that the device has; that is allowed during stream capture.
/// Throws Error(kRuntime) with the kernel, the step and the CUDA error; nothing was launched then,
/// and the runtime's last-error slot is clean. The step is turned into text only then.
void launch(const LaunchSpec& spec, void** args, cudaStream_t stream, const Step& step);

/// The same for kernels that no plan chose.
void launch(const LaunchSpec& spec, void** args, cudaStream_t stream);

}  // namespace moegemm::cuda
