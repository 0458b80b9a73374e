#pragma once

#include <optional>
#include <string_view>

#include "moegemm/plan.h"

/// The environment variables of the core, read at each call so that a process can change its mind.
namespace moegemm {

/// MOEGEMM_BACKEND: the backend that everything must use; not set or empty: the planner chooses.
std::optional<BackendKind> environment_backend();

/// What a product asks for. Walking through all variables takes about 0.1 microseconds, so that
/// both are read in one go; each is understood, or refused, when it is asked for. Not to be kept:
/// it points into the environment.
struct CallEnvironment {
  std::string_view backend_word;
  std::string_view check_word;

  /// MOEGEMM_BACKEND, as above.
  std::optional<BackendKind> backend() const;
  /// MOEGEMM_CHECK: validate m_sizes and indices before every launch; "0" or empty is off.
  bool check() const;
};
CallEnvironment environment_of_call();

/// MOEGEMM_AUTOTUNE: "0" forbids to measure anything; "1" or empty leaves it to the calls.
bool environment_allows_tuning();

/// MOEGEMM_BATCH_INVARIANT: "0" lets kernels sum in an order of their own; "1" or empty does not.
bool environment_batch_invariant();

/// MOEGEMM_NUM_THREADS: workers of default_executor(); not set or empty: one per usable core.
std::optional<int> environment_num_threads();

}  // namespace moegemm
