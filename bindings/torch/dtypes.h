#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "moegemm/kinds.h"

/// The library's number formats as torch's, and back.
namespace moegemm::torch_ops {

/// torch's numbers for what we know: asked for once, they are only fixed within one torch.
struct TorchNumbers {
  std::int32_t float32 = aoti_torch_dtype_float32();
  std::int32_t float16 = aoti_torch_dtype_float16();
  std::int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  std::int32_t int32 = aoti_torch_dtype_int32();
  std::int32_t int64 = aoti_torch_dtype_int64();
  std::int32_t uint8 = aoti_torch_dtype_uint8();
  std::int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn();
  // torch 2.12 is the first that can be asked; the number is the same in all.
  std::int32_t e8m0 = static_cast<std::int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu);
  std::int32_t cpu = aoti_torch_device_type_cpu();
  std::int32_t cuda = aoti_torch_device_type_cuda();
};
inline const TorchNumbers& numbers() {
  static const TorchNumbers known;
  return known;
}

inline std::int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return numbers().float32;
    case DType::kFloat16:
      return numbers().float16;
    case DType::kBFloat16:
      return numbers().bfloat16;
    case DType::kInt32:
      return numbers().int32;
    case DType::kInt64:
      return numbers().int64;
  }
  return numbers().float32;
}

/// None for one that no TensorView can have.
inline std::optional<DType> library_dtype(std::int32_t number) {
  const TorchNumbers& known = numbers();
  if (number == known.float32) return DType::kFloat32;
  if (number == known.bfloat16) return DType::kBFloat16;
  if (number == known.float16) return DType::kFloat16;
  if (number == known.int32) return DType::kInt32;
  if (number == known.int64) return DType::kInt64;
  return std::nullopt;
}
constexpr const char* kAcceptedDTypes =
    "bfloat16, float16 and float32 for values, int32 and int64 for sizes and indices";

}  // namespace moegemm::torch_ops
