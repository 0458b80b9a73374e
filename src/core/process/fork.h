#pragma once

namespace moegemm {

/// From here on, children of fork() can plan and tune whatever other threads of the parent were
/// doing: a fork waits until nobody changes what is shared. To be called once, as the library is
/// loaded: a child whose parent's first call was under way would wait for that call's end.
bool survive_forks();

}  // namespace moegemm
