/// cuda_rows_check [CASES] [SEED]: compares the row kernels and tile counters of GPU 0 with the CPU
/// over CASES random cases each, then times them. Exits with 1 if anything differs.

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cuda/host/device_facts.h"
#include "rows_check.h"

int main(int argc, char** argv) {
  using namespace moegemm::cuda;
  const int cases = argc > 1 ? std::atoi(argv[1]) : 200;
  const unsigned long long seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  if (device_count() == 0) {
    std::fprintf(stderr, "%s\n", why_no_device().c_str());
    return 1;
  }
  try {
    const DeviceFacts& facts = *device_facts(0);
    std::printf("%s, sm_%d%d, %d multiprocessors, %lld bytes of shared memory\n",
                facts.name.c_str(), facts.major, facts.minor, facts.multiprocessors,
                static_cast<long long>(facts.shared_memory_bytes));
    const int failures = check_tile_counters() + check_route(cases, seed) +
                         check_combine(cases, seed + 1) + check_scale_rows(cases, seed + 2) +
                         check_faults(cases, seed + 3);
    std::fflush(stdout);
    time_host_layer();
    time_rows();
    time_activation();
    return failures == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
