#pragma once

#include <cstdint>

#include "core/backend.h"

/// Weighted rows on the CPU: the top-k combine and the backward of a fused multiply. Arguments are
/// validated by the callers.
namespace moegemm::cpu::passes {

void combine(const TensorView& rows, const TensorView& weights, const TensorView& positions,
             std::int64_t topk, const TensorView& out, const ExecutionContext& context);

void scale_rows(const TensorView& product, const TensorView& x, const RoutingView& routing,
                const TensorView& scaled, const TensorView& dot, const TensorView& scaled_x,
                const ExecutionContext& context);

}  // namespace moegemm::cpu::passes
