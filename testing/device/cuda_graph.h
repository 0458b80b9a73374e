#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#include "testing/device/memory.h"

namespace moegemm::testing {

/// Throws with the call's name and CUDA's words for the error.
void require_cuda(cudaError_t status, const std::string& call);

inline cudaStream_t stream_of(Memory& memory) {
  return static_cast<cudaStream_t>(memory.context().stream);
}

/// What `work` launches on the memory's stream, captured. Capture is in global mode: a call that
/// allocates or synchronises fails.
class CapturedGraph {
 public:
  CapturedGraph(Memory& memory, const std::function<void()>& work);
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph();

  std::size_t nodes() const;
  void replay(cudaStream_t stream) const;

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace moegemm::testing
