/// cuda_timing: times the passes, the activation and the host layer on GPU 0.

#include <cstdio>
#include <exception>

#include "cuda/backend/device_facts.h"
#include "timings.h"

int main() {
  using namespace moegemm::cuda;
  if (device_count() == 0) {
    std::fprintf(stderr, "%s\n", why_no_device().c_str());
    return 1;
  }
  try {
    const DeviceFacts& facts = *device_facts(0);
    std::printf("%s, sm_%d%d, %d multiprocessors, %lld bytes of shared memory\n",
                facts.name.c_str(), facts.major, facts.minor, facts.multiprocessors,
                static_cast<long long>(facts.shared_memory_bytes));
    time_host_layer();
    time_passes();
    time_activation();
    return 0;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
