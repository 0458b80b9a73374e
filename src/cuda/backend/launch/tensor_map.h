#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <initializer_list>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// A tensor in device memory and the box that one TMA instruction moves. Dimension 0 is the
/// contiguous one. Parts of a box outside the tensor read as zero and are not stored.
struct TensorMapSpec {
  const void* base = nullptr;  ///< 16-byte aligned
  DType dtype = DType::kBFloat16;
  bool rounds_to_tf32 = false;                      ///< fp32, while it is loaded
  int rank = 0;                                     ///< 1 to 5
  std::array<std::uint64_t, 5> dims = {};           ///< elements, each 1 to 2^32
  std::array<std::uint64_t, 4> strides_bytes = {};  ///< of dims 1, 2, ...: multiples of 16, < 2^40
  std::array<std::uint32_t, 5> box = {};  ///< elements, each 1 to 256; box[0] a multiple of
                                          ///< 16 bytes, at most 128 bytes with swizzle
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMapL2promotion l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

  bool operator==(const TensorMapSpec&) const = default;
};

/// A swizzled tensor: elements of each dimension, bytes between those of dimensions 1, 2, ..., and
/// elements of the box.
TensorMapSpec tensor_spec(const void* base, DType dtype, std::initializer_list<std::int64_t> dims,
                          std::initializer_list<std::int64_t> strides_bytes,
                          std::initializer_list<std::int64_t> box);

/// The map, to be passed by value as a `const __grid_constant__ CUtensorMap` kernel parameter.
/// Touches no device memory. Throws Error(kRuntime) that names the first field that breaks a rule.
CUtensorMap encode(const TensorMapSpec& spec);

}  // namespace moegemm::cuda
