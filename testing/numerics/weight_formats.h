#pragma once

#include <cstdint>

#include "moegemm/quantization.h"

/// The formats of quantised weights, written apart from the library's own decoders.
namespace moegemm::testing {

/// The value in a byte of packed ones: with four bits each the first or the second of two.
double packed_value(WeightFormat format, std::uint8_t byte, bool second);

float decode_scale(ScaleType type, const void* scales, std::int64_t index);
/// Rounds to the type, e8m0 down to a power of two, and stores.
void encode_scale(ScaleType type, void* scales, std::int64_t index, float value);

/// A format of quantised weights as tests and the program make it.
struct MadeFormat {
  WeightFormat format;
  const char* text;      ///< as most checkpoints have it; `parse_quantization` reads it ...
  ScaleType scale_type;  ///< ... with this
  double largest;        ///< value; scales of 1 / that make weights of at most 1
};

/// The line of a format that is not plain.
const MadeFormat& made_format(WeightFormat format);

}  // namespace moegemm::testing
