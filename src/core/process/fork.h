#pragma once

namespace moegemm {

/// From the first call on, children of fork() can plan and tune whatever other threads of the
/// parent were doing: a fork waits until nobody changes what is shared.
void survive_forks();

}  // namespace moegemm
