#include "testing/device/cuda_graph.h"

#include <stdexcept>

namespace moegemm::testing {

void require_cuda(cudaError_t status, const std::string& call) {
  if (status != cudaSuccess) throw std::runtime_error(call + ": " + cudaGetErrorString(status));
}

CapturedGraph::CapturedGraph(Memory& memory, const std::function<void()>& work) {
  const cudaStream_t stream = stream_of(memory);
  memory.synchronize();
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal),
               "cudaStreamBeginCapture");
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph_);  // leaves the stream usable
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    cudaGetLastError();
    throw;
  }
  require_cuda(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
  require_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
}

CapturedGraph::~CapturedGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  if (graph_ != nullptr) cudaGraphDestroy(graph_);
}

std::size_t CapturedGraph::nodes() const {
  std::size_t count = 0;
  require_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
  return count;
}

void CapturedGraph::replay(cudaStream_t stream) const {
  require_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
}

}  // namespace moegemm::testing
