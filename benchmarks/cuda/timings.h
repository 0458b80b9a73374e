#pragma once

namespace moegemm::cuda {

/// Each prints microseconds, and bandwidth where it moves bytes.
void time_passes();
void time_activation();
void time_host_layer();

}  // namespace moegemm::cuda
