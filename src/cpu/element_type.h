#pragma once

#include "core/float16.h"
#include "moegemm/tensor.h"

namespace moegemm::cpu {

/// Calls body with a null pointer of the C++ type that stores `dtype`, one of the three floating
/// ones.
template <typename Body>
decltype(auto) with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<Float16*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

/// One element of a tensor whose dtype is only known at run time.
inline float read_float(const void* data, DType dtype, std::int64_t i) {
  return with_element_type(
      dtype, [&]<typename T>(T*) { return to_float(static_cast<const T*>(data)[i]); });
}

inline void write_float(void* data, DType dtype, std::int64_t i, float value) {
  with_element_type(dtype, [&]<typename T>(T*) { store(value, static_cast<T*>(data)[i]); });
}

}  // namespace moegemm::cpu
