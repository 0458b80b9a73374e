#pragma once

#include <functional>
#include <string>
#include <vector>

#include "moegemm/error.h"
#include "moegemm/plan.h"
#include "testing/device/memory.h"
#include "testing/numerics/comparison.h"

namespace moegemm::testing {

/// A backend under test and the memory it works on.
struct Target {
  BackendKind backend = BackendKind::kReference;
  Memory* memory = nullptr;
  /// A kernel family for one GPU generation may leave some problems to another backend: a refusal
  /// as kNotImplemented skips the case. The CPU backends and sm80 take everything.
  bool may_refuse = false;
  Accuracy accuracy;

  std::string name() const { return to_string(backend); }
  bool on_gpu() const { return memory->device().type == DeviceType::kCuda; }
  /// Whether this is how a problem is refused, by a backend that may or by the kernel of that name.
  bool may_throw(const Error& error, const std::string& kernel = "") const {
    if (kernel.empty()) return may_refuse && error.kind() == ErrorKind::kNotImplemented;
    return error.kind() == ErrorKind::kNotImplemented || error.kind() == ErrorKind::kInvalidValue;
  }
};

/// Every backend that the library lists and this machine runs.
const std::vector<Target>& targets();

/// A device type that has routing kernels: "cpu", "cuda".
struct RowTarget {
  std::string name;
  Memory* memory = nullptr;
};
const std::vector<RowTarget>& row_targets();

/// Registers a test called `suite`.`name`; its body uses GoogleTest's assertions.
void add_test(const std::string& suite, const std::string& name, std::function<void()> body);

/// One skipped test, with the reason, for each backend and device type that cannot run here.
void add_unavailable_tests();

/// The number in the environment, or `otherwise`.
std::int64_t environment_number(const char* name, std::int64_t otherwise);

/// MOEGEMM_TEST_TRIM=1: a smaller run for sanitizers, which are some 10 times slower.
bool trimmed_run();

/// The reference has no tiles: cases of more work than this, which are there for those who do, it
/// runs in one dtype.
constexpr double kMostReferenceWork = 1e7;

/// MOEGEMM_TEST_SEED or a fixed one; printed once at the start of the run.
std::uint64_t run_seed();

}  // namespace moegemm::testing
