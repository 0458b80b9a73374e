#include <atomic>

#include "core/process/environment.h"
#include "moegemm/execution.h"

namespace moegemm {
namespace {

/// A value of the environment that is refused throws again at the next call.
std::atomic<bool>& batch_invariant() {
  static std::atomic<bool> on = environment_batch_invariant();
  return on;
}

}  // namespace

bool set_batch_invariant(bool on) { return batch_invariant().exchange(on); }

bool is_batch_invariant() { return batch_invariant().load(std::memory_order_relaxed); }

}  // namespace moegemm
