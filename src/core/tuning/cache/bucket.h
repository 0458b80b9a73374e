#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include "core/backend.h"
#include "moegemm/problem.h"

namespace moegemm {

/// Where a measurement holds. All parts are readable text, as they stand in the file.
struct TuningKey {
  std::string device;      ///< "NVIDIA H200, 9.0, 132 multiprocessors"; a CPU's model name
  std::string version;     ///< of the library
  std::string kernel_set;  ///< fingerprint of the backend's kernels
  std::string problem;     ///< problem_bucket()

  bool operator==(const TuningKey&) const = default;
  bool operator<(const TuningKey& other) const {
    return std::tie(device, version, kernel_set, problem) <
           std::tie(other.device, other.version, other.kernel_set, other.problem);
  }
};

/// What a kernel's speed depends on: everything but the pointers' types and the exact token count,
/// which is rounded up to a power of two.
std::string problem_bucket(const Problem& problem);

/// "sm90 5f3a09c2": changes whenever a kernel is added, removed, renamed or rewritten; `sources` is
/// the digest of their sources.
std::string kernel_set_of(const Backend& backend, std::string_view sources);
std::string kernel_set_of(const Backend& backend);

TuningKey tuning_key(const Problem& problem, const Backend& backend);

}  // namespace moegemm
