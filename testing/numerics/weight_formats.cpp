#include "testing/numerics/weight_formats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>

#include "testing/numerics/floats.h"

namespace moegemm::testing {
namespace {

double e4m3(int bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 128) != 0 ? -magnitude : magnitude;
}

double e2m1(int bits) {
  const int exponent = (bits >> 1) & 3, mantissa = bits & 1;
  const double magnitude = exponent == 0 ? 0.5 * mantissa : std::ldexp(2 + mantissa, exponent - 2);
  return (bits & 8) != 0 ? -magnitude : magnitude;
}

/// Each value of a format once.
template <int Count>
std::array<double, Count> table_of(double (&value)(int)) {
  std::array<double, Count> values;
  for (int bits = 0; bits < Count; ++bits) values[bits] = value(bits);
  return values;
}
const std::array<double, 256> kE4m3Values = table_of<256>(e4m3);
const std::array<double, 16> kE2m1Values = table_of<16>(e2m1);

constexpr MadeFormat kMadeFormats[] = {
    {WeightFormat::kMxfp4, "mxfp4", ScaleType::kE8m0, 6},
    {WeightFormat::kFp8, "fp8/128x128", ScaleType::kFloat32, 448},
    {WeightFormat::kInt4, "int4/32", ScaleType::kBFloat16, 8},
    {WeightFormat::kNf4, "nf4/64", ScaleType::kFloat32, 1},
};
static_assert(std::size(kMadeFormats) == std::size(kWeightFormats));

DType float_type(ScaleType type) {
  return type == ScaleType::kBFloat16  ? DType::kBFloat16
         : type == ScaleType::kFloat16 ? DType::kFloat16
                                       : DType::kFloat32;
}

}  // namespace

double packed_value(WeightFormat format, std::uint8_t byte, bool second) {
  const int low = byte & 15, high = byte >> 4;
  switch (format) {
    case WeightFormat::kPlain:
      break;
    case WeightFormat::kMxfp4:
      return kE2m1Values[static_cast<std::size_t>(second ? high : low)];
    case WeightFormat::kFp8:
      return kE4m3Values[byte];
    case WeightFormat::kInt4:
      return (second ? high : low) - 8;
    case WeightFormat::kNf4:
      return static_cast<double>(kNf4Values[static_cast<std::size_t>(second ? low : high)]);
  }
  return 0;
}

float decode_scale(ScaleType type, const void* scales, std::int64_t index) {
  if (type != ScaleType::kE8m0) return decode(float_type(type), scales, index);
  const int bits = static_cast<const std::uint8_t*>(scales)[index];
  return bits == 255 ? kNan : static_cast<float>(std::ldexp(1.0, bits - 127));
}

void encode_scale(ScaleType type, void* scales, std::int64_t index, float value) {
  if (type != ScaleType::kE8m0) return encode(float_type(type), scales, index, value);
  static_cast<std::uint8_t*>(scales)[index] =
      static_cast<std::uint8_t>(std::isnan(value) ? 255 : std::ilogb(value) + 127);
}

const MadeFormat& made_format(WeightFormat format) {
  return *std::find_if(std::begin(kMadeFormats), std::end(kMadeFormats),
                       [&](const MadeFormat& made) { return made.format == format; });
}

}  // namespace moegemm::testing
