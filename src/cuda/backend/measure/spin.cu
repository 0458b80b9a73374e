#include "cuda/backend/launch/launch.h"
#include "cuda/backend/measure/spin.h"

namespace moegemm::cuda {
namespace {

__global__ void spin_kernel(unsigned long long nanoseconds) {
  unsigned long long begin = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
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
