#pragma once

#include <cstddef>
#include <cstdint>

/// Marks what the shared library exports; everything else is built with hidden visibility.
#if defined(_WIN32)
#define MOEGEMM_API
#else
#define MOEGEMM_API __attribute__((visibility("default")))
#endif

/// What a kernel is compiled for. Apart from problem.h, so that the many translation units of
/// kernels do not read the standard library with it.
namespace moegemm {

/// An entry of a table of enumerators: by the names that callers give and messages print.
template <typename Value>
struct Named {
  Value value;
  const char* name;
};

enum class Op : std::uint8_t { kForward, kDx, kDw };

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt32, kInt64 };

/// What the library knows of a number format. Its arithmetic is in a table of each backend.
struct NumberFormat {
  DType value;
  const char* name;
  std::int64_t bytes;
};
inline constexpr NumberFormat kFloatingFormats[] = {
    {DType::kBFloat16, "bf16", 2},
    {DType::kFloat16, "fp16", 2},
    {DType::kFloat32, "fp32", 4},
};
/// Of sizes and indices.
inline constexpr NumberFormat kIndexFormats[] = {
    {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},
};

/// Null if `dtype` is not among these.
template <std::size_t Count>
constexpr const NumberFormat* find_format(const NumberFormat (&formats)[Count], DType dtype) {
  for (const NumberFormat& format : formats) {
    if (format.value == dtype) return &format;
  }
  return nullptr;
}
constexpr bool is_floating(DType dtype) { return find_format(kFloatingFormats, dtype) != nullptr; }
constexpr bool is_index(DType dtype) { return find_format(kIndexFormats, dtype) != nullptr; }
constexpr const NumberFormat& format_of(DType dtype) {
  const NumberFormat* const floating = find_format(kFloatingFormats, dtype);
  if (floating != nullptr) return *floating;
  const NumberFormat* const index = find_format(kIndexFormats, dtype);
  return index != nullptr ? *index : kIndexFormats[0];  // never the latter: all are in a table
}
constexpr std::int64_t size_bytes(DType dtype) { return format_of(dtype).bytes; }

}  // namespace moegemm
