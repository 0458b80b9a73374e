#pragma once

#include "core/backend.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/describe.h"
#include "moegemm/ops.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

/// Every host-side rule of the products is in this folder, once; nothing after it checks an
/// argument again.
namespace moegemm {

/// A call that passed: what it asks for, and where its data is.
struct Call {
  Problem problem;
  Operands operands;
};

/// `describe` in a C++ caller's words, with an output, which must be given.
Description described(Op op, const TensorView& first, const TensorView& second,
                      const TensorView& out, const RoutingView& routing,
                      const GemmOptions& options);

/// A described call with its memory: strides, pointers and overlap are checked here.
Call place(const Description& description, const TensorView& first, const TensorView& second,
           const TensorView& out, const RoutingView& routing, const GemmOptions& options);

/// What the context of a call says of its problem.
void take_context(Problem& problem, const GemmOptions& options, const ExecutionContext& context);

/// What the caller calls the output.
inline const char* output_name(Op op, const CallerWords& words) {
  if (words.out != nullptr) return words.out;
  return op == Op::kForward ? "y" : op == Op::kDx ? "dx" : "dw";
}

/// That sums in the dtype of an output may be added to.
void require_accumulable(const DTypeArgument& out, const CallerWords& words);

/// The rules that need no shape.
void validate_flags(const Problem& problem, const CallerWords& words = {});
/// A Problem that was written by hand instead of described from tensors.
void validate(const Problem& problem, const CallerWords& words = {});
/// A kernel asked for by hand: what the hardware's bulk copies cannot do is refused.
void validate(const KernelConfig& config, const Problem& problem, const CallerWords& words = {});

}  // namespace moegemm
