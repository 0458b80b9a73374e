#include "core/process/fork.h"

#include <pthread.h>

#include "core/planning/planner.h"
#include "core/process/warning.h"
#include "core/tuning/cache/store.h"
#include "core/tuning/tune_call.h"

namespace moegemm {
namespace {

// In the order in which calls nest them: who makes a plan reads a store, which warns while it is
// locked.
void before_fork() {
  process_planner().stop_planning();
  hold_tuning_stores();
  process_planner().hold();
  hold_warnings();
}

void in_parent() {
  release_warnings();
  process_planner().release();
  release_tuning_stores();
}

void in_child() {
  release_warnings();
  process_planner().release_in_child();
  release_tuning_stores();
  // A measurement may take long, so that nobody waited for the end of one.
  renew_tuning_turn();
}

}  // namespace

bool survive_forks() { return pthread_atfork(before_fork, in_parent, in_child) == 0; }

}  // namespace moegemm
