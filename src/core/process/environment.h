#pragma once

#include <optional>

#include "moegemm/config.h"

/// The environment variables of the core, read at each call so that a process can change its mind.
namespace moegemm {

/// MOEGEMM_BACKEND: the backend that everything must use; not set or empty: the planner chooses.
std::optional<BackendKind> environment_backend();

/// What a product asks for. Walking through all variables takes about 0.1 microseconds, so that
/// both are read in one go.
struct CallEnvironment {
  std::optional<BackendKind> backend;  ///< as above
  bool check = false;  ///< MOEGEMM_CHECK: validate m_sizes and indices before every launch; "0" or
                       ///< empty is off
};
CallEnvironment environment_of_call();

/// MOEGEMM_AUTOTUNE: "0" forbids to measure anything; "1" or empty leaves it to the calls.
bool environment_allows_tuning();

/// MOEGEMM_NUM_THREADS: workers of default_executor(); not set or empty: one per usable core.
std::optional<int> environment_num_threads();

}  // namespace moegemm
