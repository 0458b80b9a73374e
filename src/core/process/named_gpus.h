#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace moegemm {

/// What planning needs to know about a GPU that is not here.
struct NamedGpu {
  std::string_view name;   ///< for the command line
  std::string_view title;  ///< as its driver names it
  int major = 0;           ///< compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::int64_t block_shared_bytes = 0;           ///< most that one block may opt in to
  std::int64_t multiprocessor_shared_bytes = 0;  ///< for all blocks on a multiprocessor
  std::int64_t l2_bytes = 0;
  double clock_hz = 0;          ///< highest of the multiprocessors
  double bytes_per_second = 0;  ///< of device memory, by its bus
};

/// Devices of named GPUs are numbered from here on, where no machine's own numbers reach.
inline constexpr int kFirstNamedGpu = 0x4000;

std::span<const NamedGpu> named_gpus();
/// nullptr for the number of a real device.
const NamedGpu* named_gpu(int device_index);

}  // namespace moegemm
