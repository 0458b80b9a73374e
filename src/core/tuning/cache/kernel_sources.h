#pragma once

namespace moegemm {

/// Digests of src/cpu and src/cuda with the compiler's version, made by the build
/// (cmake/KernelSources.cmake): a kernel that was rewritten under its old name is another kernel.
const char* cpu_kernel_sources();
const char* cuda_kernel_sources();

}  // namespace moegemm
