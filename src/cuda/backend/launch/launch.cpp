#include "cuda/backend/launch/launch.h"

#include <cuda.h>

#include "cuda/backend/error.h"
#include "cuda/backend/launch/loading.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

bool launched_early(const LaunchSpec& spec, cudaFunction_t function, void** args,
                    cudaStream_t stream) {
  static const auto launch_kernel =
      reinterpret_cast<decltype(&cuLaunchKernelEx)>(driver_entry("cuLaunchKernelEx"));
  if (launch_kernel == nullptr) return false;
  CUlaunchAttribute serialization = {};
  serialization.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  serialization.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = spec.grid.x;
  config.gridDimY = spec.grid.y;
  config.gridDimZ = spec.grid.z;
  config.blockDimX = spec.block.x;
  config.blockDimY = spec.block.y;
  config.blockDimZ = spec.block.z;
  config.sharedMemBytes = static_cast<unsigned>(spec.dynamic_smem_bytes);
  config.hStream = stream;
  config.attrs = &serialization;
  config.numAttrs = 1;
  return launch_kernel(&config, function, args, nullptr) == CUDA_SUCCESS;
}

/// Through the driver, which spares the runtime's search for the function and its context. A thread
/// without one yet, or with another than the runtime's, is left to the runtime.
bool launched_by_driver(const LaunchSpec& spec, cudaFunction_t function, void** args,
                        cudaStream_t stream) {
  if (spec.early) return launched_early(spec, function, args, stream);
  static const auto launch_kernel =
      reinterpret_cast<decltype(&cuLaunchKernel)>(driver_entry("cuLaunchKernel"));
  return launch_kernel != nullptr &&
         launch_kernel(function, spec.grid.x, spec.grid.y, spec.grid.z, spec.block.x, spec.block.y,
                       spec.block.z, static_cast<unsigned>(spec.dynamic_smem_bytes), stream, args,
                       nullptr) == CUDA_SUCCESS;
}

cudaError_t try_launch(const LaunchSpec& spec, void** args, cudaStream_t stream) {
  int device = spec.device;
  if (device < 0) {
    if (const auto status = cudaGetDevice(&device); status != cudaSuccess) {
      return status;
    }
  }
  cudaFunction_t function = nullptr;
  if (const auto status = ensure_loaded(spec.function, device, function); status != cudaSuccess) {
    return status;
  }
  if (launched_by_driver(spec, function, args, stream)) {
    return cudaSuccess;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = spec.grid;
  config.blockDim = spec.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(spec.dynamic_smem_bytes);
  config.stream = stream;
  return cudaLaunchKernelExC(&config, spec.function, args);
}

std::string to_string(const dim3& extent) {
  return std::to_string(extent.x) + "x" + std::to_string(extent.y) + "x" + std::to_string(extent.z);
}

[[noreturn]] void throw_failure(const LaunchSpec& spec, cudaError_t status, const Step* step) {
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorKind::kRuntime,
              "could not launch CUDA kernel " + std::string(spec.name) + " (grid " +
                  to_string(spec.grid) + ", block " + to_string(spec.block) + ", " +
                  std::to_string(spec.dynamic_smem_bytes) + " bytes of dynamic shared memory" +
                  (step ? ", planned as " + moegemm::to_string(*step) : std::string()) +
                  "): " + describe(status));
}

}  // namespace

void launch(const LaunchSpec& spec, void** args, cudaStream_t stream, const Step& step) {
  if (const auto status = try_launch(spec, args, stream); status != cudaSuccess) {
    throw_failure(spec, status, &step);
  }
}

void launch(const LaunchSpec& spec, void** args, cudaStream_t stream) {
  if (const auto status = try_launch(spec, args, stream); status != cudaSuccess) {
    throw_failure(spec, status, nullptr);
  }
}

}  // namespace moegemm::cuda
