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

/// The largest value of a format; scales of 1 / that make weights of at most 1.
double largest_value(WeightFormat format);

}  // namespace moegemm::testing
