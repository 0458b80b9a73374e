#pragma once

#include <cstdint>
#include <vector>

#include "moegemm/tensor.h"
#include "testing/device/memory.h"

namespace moegemm::testing {

/// Device memory and the view of it.
struct DeviceTensor {
  Buffer buffer;
  TensorView view;
};

/// [count], uninitialised.
DeviceTensor make_vector(Memory& memory, DType dtype, std::int64_t count);
/// [rows, cols], uninitialised.
DeviceTensor make_matrix(Memory& memory, DType dtype, std::int64_t rows, std::int64_t cols);
/// [count, rows, cols], uninitialised.
DeviceTensor make_stack(Memory& memory, DType dtype, std::int64_t count, std::int64_t rows,
                        std::int64_t cols);

/// A vector with these values, whose type must be that of `dtype`.
template <typename T>
DeviceTensor upload(Memory& memory, DType dtype, const std::vector<T>& values) {
  DeviceTensor tensor = make_vector(memory, dtype, static_cast<std::int64_t>(values.size()));
  tensor.buffer.upload(values.data());
  return tensor;
}

}  // namespace moegemm::testing
