#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "testing/device/memory.h"

namespace moegemm::cuda {

/// GPU 0, with the stream that everything here is ordered on; throws where there is none.
testing::Memory& gpu();

/// Memory of the GPU, all zero.
testing::Buffer zeroed(std::int64_t bytes);

/// Rows dealt out evenly to experts, and a permutation of rows that no cache can follow.
std::vector<std::int64_t> even_sizes(std::int64_t rows, std::int64_t experts);
std::vector<std::int64_t> shuffled(std::int64_t rows);

/// Work on the stream of gpu().
using Launch = std::function<void()>;

/// A copy of the first `bytes` from one buffer to the other, both of which have to outlive it.
Launch copy(const testing::Buffer& to, const testing::Buffer& from, std::int64_t bytes);

/// Microseconds of one launch of each contender, which take turns: `calls` of one are captured in a
/// graph, and the median of its replays counts. No host time is in it.
std::vector<double> round_robin_microseconds(const std::vector<Launch>& contenders, int calls,
                                             int rounds = 15);

/// The same for one alone.
double graph_microseconds(const Launch& launch, int calls);

}  // namespace moegemm::cuda
