#pragma once

#include <cstdint>

/// What a kernel is compiled for. Apart from problem.h, so that the many translation units of
/// kernels do not read the standard library with it.
namespace moegemm {

enum class Op : std::uint8_t { kForward, kDx, kDw };

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt32, kInt64 };

}  // namespace moegemm
