#include "graph_timing.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "testing/device/cuda_graph.h"

namespace moegemm::cuda {
namespace {

/// Loads the kernels, so that replays do not, and returns the launches as a graph.
std::unique_ptr<testing::CapturedGraph> capture(const Launch& launch, int calls) {
  launch();
  return std::make_unique<testing::CapturedGraph>(gpu(), [&] {
    for (int i = 0; i < calls; ++i) launch();
  });
}

}  // namespace

testing::Memory& gpu() {
  std::string why_none;
  testing::Memory* memory = testing::cuda_memory(&why_none);
  if (memory == nullptr) throw std::runtime_error(why_none);
  return *memory;
}

testing::Buffer zeroed(std::int64_t bytes) {
  testing::Buffer buffer(gpu(), static_cast<std::size_t>(bytes));
  buffer.fill(0);
  return buffer;
}

std::vector<std::int64_t> even_sizes(std::int64_t rows, std::int64_t experts) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t e = 0; e < experts; ++e) {
    sizes.push_back(rows * (e + 1) / experts - rows * e / experts);
  }
  return sizes;
}

std::vector<std::int64_t> shuffled(std::int64_t rows) {
  std::vector<std::int64_t> indices;
  for (std::int64_t r = 0; r < rows; ++r) indices.push_back(r * 40503 % rows);
  return indices;
}

Launch copy(const testing::Buffer& to, const testing::Buffer& from, std::int64_t bytes) {
  return [&to, &from, bytes] {
    gpu().copy_within(to.data(), from.data(), static_cast<std::size_t>(bytes));
  };
}

std::vector<double> round_robin_microseconds(const std::vector<Launch>& contenders, int calls,
                                             int rounds) {
  std::vector<std::unique_ptr<testing::CapturedGraph>> captured;
  for (const Launch& contender : contenders) captured.push_back(capture(contender, calls));
  std::vector<std::vector<double>> times(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < captured.size(); ++i) {
      times[i].push_back(
          gpu().milliseconds([&] { captured[i]->replay(testing::stream_of(gpu())); }));
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of_one : times) {
    std::sort(of_one.begin(), of_one.end());
    medians.push_back(1e3 * of_one[of_one.size() / 2] / calls);
  }
  return medians;
}

double graph_microseconds(const Launch& launch, int calls) {
  return round_robin_microseconds({launch}, calls).front();
}

}  // namespace moegemm::cuda
