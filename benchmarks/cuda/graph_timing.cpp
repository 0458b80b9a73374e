#include "graph_timing.h"

#include <algorithm>
#include <memory>

namespace moegemm::cuda {
namespace {

/// Calls of one contender as an executable graph.
class CapturedCalls {
 public:
  CapturedCalls(const StreamCall& call, int calls, cudaStream_t stream) : stream_(stream) {
    call(stream);  // loads the kernels
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
    for (int i = 0; i < calls; ++i) call(stream);
    check(cudaStreamEndCapture(stream, &graph), "end capture");
    check(cudaGraphInstantiate(&graph_, graph, 0), "instantiate");
    check(cudaGraphDestroy(graph), "destroy a graph");
    check(cudaEventCreate(&begin_), "create an event");
    check(cudaEventCreate(&end_), "create an event");
  }
  ~CapturedCalls() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaGraphExecDestroy(graph_));
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  float replay_milliseconds() {
    check(cudaEventRecord(begin_, stream_), "record");
    check(cudaGraphLaunch(graph_, stream_), "replay");
    check(cudaEventRecord(end_, stream_), "record");
    check(cudaEventSynchronize(end_), "wait");
    float elapsed = 0;
    check(cudaEventElapsedTime(&elapsed, begin_, end_), "read the time");
    return elapsed;
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

std::vector<double> round_robin_microseconds(const std::vector<StreamCall>& contenders, int calls,
                                             int rounds) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
  std::vector<std::unique_ptr<CapturedCalls>> captured;
  for (const StreamCall& contender : contenders) {
    captured.push_back(std::make_unique<CapturedCalls>(contender, calls, stream));
  }
  std::vector<std::vector<float>> times(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < captured.size(); ++i) {
      times[i].push_back(captured[i]->replay_milliseconds());
    }
  }
  captured.clear();
  check(cudaStreamDestroy(stream), "destroy a stream");
  std::vector<double> medians;
  for (std::vector<float>& of_one : times) {
    std::sort(of_one.begin(), of_one.end());
    medians.push_back(1e3 * of_one[of_one.size() / 2] / calls);
  }
  return medians;
}

double graph_microseconds(const StreamCall& call, int calls) {
  return round_robin_microseconds({call}, calls).front();
}

}  // namespace moegemm::cuda
