#pragma once

#include <string_view>

#include "moegemm/problem.h"

namespace moegemm::cuda::sm80 {

/// Whether kernels compiled for the comma-separated `archs`, ascending ("80,90", "86,90a"), run on
/// a GPU of compute capability major.minor: the first one is there as PTX too, which any newer GPU
/// can compile.
bool runs_on(std::string_view archs, int major, int minor);

/// What this library was compiled for, as above.
std::string_view compiled_archs();

/// Floating-point operations that a multiprocessor does in a clock for this problem's dtype and
/// TF32 setting, as mma.sync and fmaf reach them.
double flops_per_clock(const Problem& problem, int major, int minor);

}  // namespace moegemm::cuda::sm80
