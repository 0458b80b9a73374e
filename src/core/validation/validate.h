#pragma once

#include "core/backend.h"
#include "moegemm/config.h"
#include "moegemm/ops.h"
#include "moegemm/problem.h"
#include "moegemm/routing.h"

/// Turns the arguments of a call into a Problem and its pointers, or refuses: every host-side rule
/// of the library is here, and nothing behind this header checks an argument again.
namespace moegemm {

/// A call that passed: what it asks for, and where its data is.
struct Call {
  Problem problem;
  Operands operands;
};

Call describe_forward(const TensorView& x, const TensorView& w, const TensorView& y,
                      const RoutingView& routing, const GemmOptions& options);
Call describe_dx(const TensorView& dy, const TensorView& w, const TensorView& dx,
                 const RoutingView& routing, const GemmOptions& options);
Call describe_dw(const TensorView& dy, const TensorView& x, const TensorView& dw,
                 const RoutingView& routing, const GemmOptions& options);

/// A Problem that was written by hand instead of described from tensors.
void validate(const Problem& problem);
/// A kernel asked for by hand: what the hardware's bulk copies cannot do is refused.
void validate(const KernelConfig& config, const Problem& problem);

}  // namespace moegemm
