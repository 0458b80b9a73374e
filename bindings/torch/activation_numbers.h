#pragma once

#include <limits>

#include "arguments.h"
#include "moegemm/epilogue.h"

namespace moegemm::torch_ops {

/// The numbers of the operators' `activation` argument: function and layout as in
/// moegemm/activation.h; python/moegemm/activations.py has the same order.
inline Activation activation_from(std::int64_t function, std::int64_t layout, double alpha,
                                  double limit, double up_offset) {
  if (function < 0 || function > static_cast<std::int64_t>(ActivationFunction::kRelu2)) {
    refuse_value("function is ", function, "; it must be between 0 and 3");
  }
  if (layout < 0 || layout > static_cast<std::int64_t>(GateLayout::kInterleaved)) {
    refuse_value("layout is ", layout, "; it must be between 0 and 2");
  }
  // Python writes no limit as the largest double: not every file that keeps a call has infinities.
  const float clamp = limit > std::numeric_limits<float>::max()
                          ? std::numeric_limits<float>::infinity()
                          : static_cast<float>(limit);
  return {static_cast<ActivationFunction>(function), static_cast<GateLayout>(layout),
          static_cast<float>(alpha), clamp, static_cast<float>(up_offset)};
}

}  // namespace moegemm::torch_ops
