#pragma once

namespace moegemm::cuda::sm90 {

/// Every Hopper kernel runs one block of three warpgroups on a multiprocessor: one produces stages,
/// two consume them.
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
constexpr int kSharedMemoryLimit = 232448;  ///< opt-in limit of sm_90: 227 KiB

}  // namespace moegemm::cuda::sm90
