#pragma once

#include <optional>

#include "core/validation/validate.h"

/// Kernels know W as [E, N, K] only. With W as [E, K, N] the same product is another one of theirs:
/// Y = X W^T and dX = dY W are each other's formula with W transposed, and in dW the operands
/// change places. Nothing is copied, and nothing after this knows of the other layout.
namespace moegemm {

/// The same product in terms of W as it is stored, with [E, N, K] as its layout.
Problem in_stored_form(const Problem& problem);
Call in_stored_form(Call call);
/// Of a Problem that was written by hand: checked, and what a call would ask for.
Problem asked_by_hand(const Problem& written, const std::optional<KernelConfig>& config);

}  // namespace moegemm
