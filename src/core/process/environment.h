#pragma once

#include <optional>

#include "moegemm/config.h"

/// The environment variables of the core, read at each call so that a process can change its mind
/// (a lookup takes about 0.1 microseconds).
namespace moegemm {

/// MOEGEMM_BACKEND: the backend that everything must use; not set or empty: the planner chooses.
std::optional<BackendKind> environment_backend();

/// MOEGEMM_CHECK: validate m_sizes and indices before every launch. "0" or empty is off.
bool environment_check();

/// MOEGEMM_AUTOTUNE: "0" forbids to measure anything; "1" or empty leaves it to the calls.
bool environment_allows_tuning();

/// MOEGEMM_NUM_THREADS: workers of default_executor(); not set or empty: one per usable core.
std::optional<int> environment_num_threads();

}  // namespace moegemm
