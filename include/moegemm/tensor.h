#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "moegemm/kinds.h"

namespace moegemm {

enum class DeviceType : std::uint8_t {
  kCpu,
  kCuda,
  kMeta,  ///< no memory: calls refuse what they would refuse on others, and do nothing
};

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;  ///< CUDA ordinal; 0 for the CPU
  bool operator==(const Device&) const = default;
};

/// A tensor that somebody else owns: a pointer and what is needed to walk it. The last dimension is
/// contiguous, rows are `row_stride` elements apart, and the matrices of a rank-3 view are
/// `shape[1] * row_stride` elements apart. A view passed as an input is never written through.
/// A default-constructed view means "not given".
struct MOEGEMM_API TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;                            ///< 1, 2 or 3; 0 when not given
  std::array<std::int64_t, 3> shape = {};  ///< the first `rank` entries count
  std::int64_t row_stride = 0;             ///< elements between rows; unused at rank 1
  Device device;

  bool given() const { return rank != 0; }
  std::int64_t numel() const;

  /// [n]
  static TensorView vector(const void* data, DType dtype, std::int64_t n, Device device = {});
  /// [rows, columns]; `row_stride` 0 means dense rows.
  static TensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                           std::int64_t row_stride = 0, Device device = {});
  /// [count, rows, columns]; `row_stride` 0 means dense rows.
  static TensorView stack(const void* data, DType dtype, std::int64_t count, std::int64_t rows,
                          std::int64_t columns, std::int64_t row_stride = 0, Device device = {});
};

MOEGEMM_API const char* to_string(DType dtype);    ///< "bf16", "fp16", "fp32", "int32", "int64"
MOEGEMM_API std::string to_string(Device device);  ///< "cpu", "cuda:0"
MOEGEMM_API std::string to_string(const TensorView& view);  ///< "bf16[8, 64] on cpu"

}  // namespace moegemm
