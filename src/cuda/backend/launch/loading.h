#pragma once

#include <cuda_runtime_api.h>

#include <vector>

/// Loading kernels onto a GPU, and functions from the driver. The driver does it at a kernel's
/// first launch, half a millisecond each; a layer forward and backward has a dozen.
namespace moegemm::cuda {

/// Loads the function on the device, which must be current, and lets it use all shared memory that
/// a block can get. Once for each function and device, whichever threads ask; allowed while some
/// stream is captured. `loaded` becomes what the driver launches: a device must
/// not be reset while the library is in use.
cudaError_t ensure_loaded(const void* function, int device, cudaFunction_t& loaded);

/// A function of the CUDA driver that is there, so that the library needs no libcuda to load; null:
/// it has none of that name.
void* driver_entry(const char* name);

/// The kernels of one source file that a layer in 16 bits may run, for load_listed_kernels: an
/// object of static storage beside them.
class ListedKernels {
 public:
  using Functions = std::vector<const void*> (*)();

  /// Only for devices of compute capability `least_major` up to `most_major`.
  ListedKernels(Functions functions, int least_major, int most_major);
  explicit ListedKernels(Functions functions) : ListedKernels(functions, 0, 1000) {}
};

/// Loads all of them on a device that has a context already: one is not made for it. Returns how
/// many there are, 0 without a context. Throws Error(kRuntime) if one cannot be loaded.
int load_listed_kernels(int device);

}  // namespace moegemm::cuda
