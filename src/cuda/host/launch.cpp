#include "cuda/host/launch.h"

#include "cuda/host/error.h"
#include "cuda/host/loading.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

cudaError_t try_launch(const LaunchSpec& spec, void** args, cudaStream_t stream) {
  int device = spec.device;
  if (device < 0) {
    if (const auto status = cudaGetDevice(&device); status != cudaSuccess) {
      return status;
    }
  }
  if (const auto status = ensure_loaded(spec.function, device); status != cudaSuccess) {
    return status;
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

[[noreturn]] void throw_failure(const LaunchSpec& spec, cudaError_t status, const Plan* plan) {
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorKind::kRuntime,
              "could not launch CUDA kernel " + std::string(spec.name) + " (grid " +
                  to_string(spec.grid) + ", block " + to_string(spec.block) + ", " +
                  std::to_string(spec.dynamic_smem_bytes) + " bytes of dynamic shared memory" +
                  (plan ? ", plan " + moegemm::to_string(*plan) : std::string()) +
                  "): " + describe(status));
}

}  // namespace

void launch(const LaunchSpec& spec, void** args, cudaStream_t stream, const Plan& plan) {
  if (const auto status = try_launch(spec, args, stream); status != cudaSuccess) {
    throw_failure(spec, status, &plan);
  }
}

void launch(const LaunchSpec& spec, void** args, cudaStream_t stream) {
  if (const auto status = try_launch(spec, args, stream); status != cudaSuccess) {
    throw_failure(spec, status, nullptr);
  }
}

}  // namespace moegemm::cuda
