#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "moegemm/execution.h"
#include "moegemm/kinds.h"
#include "moegemm/tensor.h"

/// The factors of low-rank parts (GemmOptions::low_rank_weights), which their owners keep in other
/// layouts and formats than the products read: PEFT has B as [N, r, E] in fp32.
namespace moegemm {

/// A stack [E, rows, columns] that somebody else owns, with any strides, in elements.
struct StridedStack {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<std::int64_t, 3> shape = {};
  std::array<std::int64_t, 3> strides = {};
  Device device;
};

/// to[e, i, j] = scaling * from[e, i, j] in fp32, rounded once. `to` has as many experts and at
/// least as many rows and columns; what it has more is zero.
struct FactorCopy {
  StridedStack from;
  StridedStack to;
  float scaling = 1.0f;
};

/// All copies, on a GPU in one launch for every eight. No `to` may be in the memory of another
/// tensor. With m_sizes, [E] int32 or int64, experts of size 0 or less are left out: their part of
/// `from` is not read, and their part of `to` stays as it is.
MOEGEMM_API void copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes = {},
                              const ExecutionContext& context = {});

}  // namespace moegemm
