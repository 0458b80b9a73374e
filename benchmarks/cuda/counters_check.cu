#include <cstdio>
#include <set>
#include <thread>
#include <vector>

#include "cuda/host/device_facts.h"
#include "cuda/host/error.h"
#include "cuda/host/launch.h"
#include "cuda/host/tile_counters.h"
#include "rows_check.h"

namespace moegemm::cuda {
namespace {

/// What a persistent product does with its counter and nothing else: each block draws tiles and
/// marks them; the last block to finish sets the counter back.
__global__ void mark_tiles(TileCounter* counter, unsigned tiles, unsigned* marks) {
  __shared__ unsigned tile;
  unsigned current = blockIdx.x;
  while (current < tiles) {
    if (threadIdx.x == 0) {
      atomicAdd(&marks[current], 1u);
      __nanosleep(200);
      tile = counter ? gridDim.x + atomicAdd(&counter->next, 1u) : current + gridDim.x;
    }
    __syncthreads();
    current = tile;
    __syncthreads();
  }
  if (threadIdx.x == 0 && counter) {
    __threadfence();
    if (atomicAdd(&counter->finished, 1u) == gridDim.x - 1) {
      counter->next = 0;
      counter->finished = 0;
    }
  }
}

constexpr unsigned kTiles = 2000;
constexpr unsigned kBlocks = 40;  // several launches fit on the GPU at the same time

/// Launches on one stream and remembers how often each tile should be marked.
class Marker {
 public:
  Marker() {
    check(cudaMalloc(&marks_, kTiles * sizeof(unsigned)), "allocate marks");
    check(cudaMemset(marks_, 0, kTiles * sizeof(unsigned)), "clear marks");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
  }
  ~Marker() {
    static_cast<void>(cudaStreamDestroy(stream_));
    static_cast<void>(cudaFree(marks_));
  }
  Marker(const Marker&) = delete;
  Marker& operator=(const Marker&) = delete;

  cudaStream_t stream() const { return stream_; }

  TileCounter* launch_once() {
    TileCounter* counter = acquire_tile_counter(0, stream_);
    unsigned tiles = kTiles;
    void* parameters[] = {&counter, &tiles, &marks_};
    launch({reinterpret_cast<const void*>(&mark_tiles), "mark_tiles", dim3(kBlocks), dim3(64)},
           parameters, stream_);
    return counter;
  }

  int wrong_tiles(unsigned launches) {
    check(cudaStreamSynchronize(stream_), "wait for mark_tiles");
    std::vector<unsigned> marks(kTiles);
    check(cudaMemcpy(marks.data(), marks_, kTiles * sizeof(unsigned), cudaMemcpyDeviceToHost),
          "read marks");
    int wrong = 0;
    for (const unsigned mark : marks) wrong += mark != launches;
    return wrong;
  }

 private:
  unsigned* marks_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ~Graph() {
    if (executable) static_cast<void>(cudaGraphExecDestroy(executable));
    if (graph) static_cast<void>(cudaGraphDestroy(graph));
  }
};

}  // namespace

int check_tile_counters() {
  constexpr int kStreams = 4, kLaunches = 200, kCaptured = 3;
  int failures = 0;
  const auto expect = [&](bool good, const char* what) {
    if (!good) {
      ++failures;
      std::printf("tile counters: %s\n", what);
    }
  };

  // Captured first: the capture loads the module and the kernel, and must survive that.
  Marker replayed;
  Graph graph;
  check(cudaStreamBeginCapture(replayed.stream(), cudaStreamCaptureModeGlobal), "begin capture");
  std::set<TileCounter*> captured;
  for (int i = 0; i < kCaptured; ++i) captured.insert(replayed.launch_once());
  check(cudaStreamEndCapture(replayed.stream(), &graph.graph), "end capture");
  check(cudaGraphInstantiate(&graph.executable, graph.graph, 0), "instantiate");
  expect(captured.size() == kCaptured && !captured.contains(nullptr),
         "captured launches share a counter");

  // The graph is replayed while four threads launch eagerly, each on its own stream.
  std::vector<Marker> eager(kStreams);
  std::vector<std::thread> threads;
  std::vector<TileCounter*> used(kStreams);
  for (int t = 0; t < kStreams; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kLaunches; ++i) used[t] = eager[t].launch_once();
    });
  }
  for (int i = 0; i < kLaunches / kCaptured; ++i) {
    check(cudaGraphLaunch(graph.executable, replayed.stream()), "replay");
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kStreams; ++t) {
    expect(eager[t].wrong_tiles(kLaunches) == 0, "an eager launch lost or repeated a tile");
    expect(used[t] == acquire_tile_counter(0, eager[t].stream()), "a stream changed its counter");
    expect(!captured.contains(used[t]), "an eager launch got a captured launch's counter");
  }
  expect(replayed.wrong_tiles(kLaunches / kCaptured * kCaptured) == 0,
         "a replayed launch lost or repeated a tile");
  expect(std::set<TileCounter*>(used.begin(), used.end()).size() == kStreams,
         "two streams share a counter");
  replayed.launch_once();
  expect(replayed.wrong_tiles(kLaunches / kCaptured * kCaptured + 1) == 0,
         "an eager launch after the replays lost or repeated a tile");
  std::printf("%-12s %s\n", "tile counters", failures ? "FAILED" : "good");
  return failures;
}

}  // namespace moegemm::cuda
