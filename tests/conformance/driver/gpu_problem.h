#pragma once

#include <optional>
#include <string>

#include "conformance/driver/targets.h"
#include "testing/device/device_problem.h"

namespace moegemm::testing {

/// A problem that keeps a GPU busy for some microseconds: several tiles each way, empty experts,
/// rows past the segments; with the first permutation or the second and the multiply.
ProblemCase busy_case(Permutation permutation, std::int64_t scale = 1);

/// The targets that run on a GPU.
std::vector<Target> gpu_targets();

/// Poisons the output and calls, both ordered on the memory's stream. `lender`, if any, lends the
/// call memory and has to live until the call has finished.
void relaunch(const Target& target, Memory& memory, DeviceProblem& problem,
              MemorySupport* lender = nullptr);

/// The result of a call alone on the device, checked against the oracle; empty when the backend
/// leaves the problem to another.
std::optional<std::vector<unsigned char>> checked_result(const Target& target, Memory& memory,
                                                         const HostProblem& host,
                                                         DeviceProblem& problem,
                                                         MemorySupport& lender);

}  // namespace moegemm::testing
