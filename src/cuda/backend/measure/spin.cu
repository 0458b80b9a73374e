#include "cuda/backend/launch/launch.h"
#include "cuda/backend/measure/spin.h"
#include "cuda/ptx/arithmetic.cuh"

namespace moegemm::cuda {
namespace {

__global__ void spin_kernel(unsigned long long nanoseconds) {
  const unsigned long long begin = ptx::globaltimer();
  while (ptx::globaltimer() - begin < nanoseconds) {
  }
}

}  // namespace

void spin(int microseconds, cudaStream_t stream) {
  unsigned long long nanoseconds = 1000ULL * static_cast<unsigned long long>(microseconds);
  void* arguments[] = {&nanoseconds};
  LaunchSpec spec;
  spec.function = reinterpret_cast<const void*>(&spin_kernel);
  spec.name = "spin";
  spec.grid = dim3(1);
  spec.block = dim3(1);
  launch(spec, arguments, stream);
}

}  // namespace moegemm::cuda
