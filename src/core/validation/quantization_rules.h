#pragma once

#include <cstdint>

#include "core/validation/tensor_rules.h"
#include "moegemm/describe.h"
#include "moegemm/problem.h"
#include "moegemm/quantization.h"

/// Rules about quantised weights. Each throws moegemm::Error with the argument's name, what it is
/// and what is accepted, or returns.
namespace moegemm {

/// The scales of a quantised W under the name that their caller knows them by.
struct ScalesArgument {
  const char* name;
  const ScalesView& view;
};

/// That the operation reads a quantised W at all: the rules that need no shape.
void validate_quantized_op(const Problem& problem, const CallerWords& words);

/// That they are given. `none`: what the caller calls those that are not.
void require_given(const ScalesArgument& scales, const Quantization& quantization,
                   const char* none);

/// The blocks and scales of a format for a W_e of [n, k]. `name` is what has that shape,
/// `scales_name` its scales.
void require_blocks(const Quantization& quantization, const char* name, const char* scales_name,
                    std::int64_t n, std::int64_t k);

/// Scales that are those of the quantization, for `experts` matrices of [n, k] on `device`.
void require_scales(const ScalesArgument& scales, const Quantization& quantization,
                    std::int64_t experts, std::int64_t n, std::int64_t k, Device device);

/// Packed values and scales have memory, dense, and none of it is `out`'s. W is [E, N, K] or
/// [E * N, K].
void require_packed_memory(const Argument& w, const ScalesArgument& scales,
                           const Quantization& quantization, std::int64_t n, std::int64_t k,
                           const Argument& out);

/// Problem::packed_alignment and scales_alignment.
int packed_alignment(const TensorView& w, const Quantization& quantization);
int scales_alignment(const ScalesView& scales, const Quantization& quantization, std::int64_t n,
                     std::int64_t k);

}  // namespace moegemm
