#pragma once

#include "moegemm/export.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Loads the kernels of expert layers in 16 bits onto a GPU now. Without it the driver loads each
/// at its first launch, half a millisecond each. Returns how many there are; 0 on the CPU, and on a
/// GPU where this process has no context yet, as none is made for it. Safe from any thread, also
/// while another one captures a graph.
MOEGEMM_API int load_kernels(Device device);

/// MOEGEMM_LOAD_EARLY: whether a Python process should load the kernels in the background once it
/// uses a GPU. "0" is no, "1" or empty yes; throws kInvalidValue for other words.
MOEGEMM_API bool loads_early();

}  // namespace moegemm
