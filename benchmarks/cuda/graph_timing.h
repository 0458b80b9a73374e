#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/host/error.h"

namespace moegemm::cuda {

/// Device memory, all zero.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::int64_t bytes) {
    check(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "allocate device memory");
    check(cudaMemset(data_, 0, static_cast<std::size_t>(bytes)), "clear device memory");
  }
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

using StreamCall = std::function<void(cudaStream_t)>;

/// Microseconds of one call of each contender, which take turns: `calls` of one are captured in a
/// graph, and the median of its replays counts. No host time is in it.
std::vector<double> round_robin_microseconds(const std::vector<StreamCall>& contenders, int calls,
                                             int rounds = 15);

/// The same for one alone.
double graph_microseconds(const StreamCall& call, int calls);

}  // namespace moegemm::cuda
