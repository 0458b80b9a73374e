#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>

#include "moegemm/kinds.h"

/// The library's number formats as torch's, and back.
namespace moegemm::torch_ops {

struct TorchFormat {
  DType value;
  std::int32_t number;  ///< torch's
};

/// torch's numbers for what we know: asked for once, they are only fixed within one torch.
struct TorchNumbers {
  std::array<TorchFormat, 5> formats = {{
      {DType::kBFloat16, aoti_torch_dtype_bfloat16()},
      {DType::kFloat16, aoti_torch_dtype_float16()},
      {DType::kFloat32, aoti_torch_dtype_float32()},
      {DType::kInt32, aoti_torch_dtype_int32()},
      {DType::kInt64, aoti_torch_dtype_int64()},
  }};
  // Of quantised weights and their scales.
  std::int32_t int32 = aoti_torch_dtype_int32();
  std::int32_t uint8 = aoti_torch_dtype_uint8();
  std::int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn();
  // torch 2.12 is the first that can be asked; the number is the same in all.
  std::int32_t e8m0 = static_cast<std::int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu);
  std::int32_t cpu = aoti_torch_device_type_cpu();
  std::int32_t cuda = aoti_torch_device_type_cuda();
  std::int32_t meta = aoti_torch_device_type_meta();
};
static_assert(std::tuple_size_v<decltype(TorchNumbers::formats)> ==
              std::size(kFloatingFormats) + std::size(kIndexFormats));
inline const TorchNumbers& numbers() {
  static const TorchNumbers known;
  return known;
}

inline std::int32_t torch_dtype(DType dtype) {
  const auto& formats = numbers().formats;
  std::size_t at = 0;
  while (formats[at].value != dtype) ++at;  // each is there
  return formats[at].number;
}

/// None for one that no TensorView can have.
inline std::optional<DType> library_dtype(std::int32_t number) {
  for (const TorchFormat& format : numbers().formats) {
    if (format.number == number) return format.value;
  }
  return std::nullopt;
}

/// "a, b and c", of a table of the library's.
template <class Table>
std::string names_of(const Table& table) {
  std::string text;
  std::size_t left = std::size(table);
  for (const auto& entry : table) {
    text.append(text.empty() ? "" : left == 1 ? " and " : ", ").append(entry.name);
    --left;
  }
  return text;
}

}  // namespace moegemm::torch_ops
