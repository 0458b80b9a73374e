#include <gtest/gtest.h>

#include "moegemm/epilogue.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

TEST(ActivationText, IsReadAsItIsWritten) {
  for (const Activation& activation :
       {Activation{}, Activation{ActivationFunction::kRelu2, GateLayout::kNone},
        Activation{ActivationFunction::kSilu, GateLayout::kInterleaved, 1.702f, 7.0f, 1.0f},
        Activation{ActivationFunction::kGeluTanh, GateLayout::kConcatenated, 1.0f, 0.5f}}) {
    EXPECT_EQ(parse_activation(to_string(activation)), activation) << to_string(activation);
  }
  EXPECT_EQ(parse_activation("silu/none alpha=-2e-1").alpha, -0.2f);
}

TEST(ActivationText, RefusesWhatItDoesNotKnow) {
  const auto refused = [](const char* text, std::initializer_list<const char*> parts) {
    testing::expect_refusal(ErrorKind::kInvalidValue, parts, [&] { parse_activation(text); });
  };
  refused("", {"activation is ''", "function/layout"});
  refused("silu", {"activation is 'silu'", "function/layout"});
  refused("tanh/none", {"activation is 'tanh'", "silu, gelu"});
  refused("silu/rows", {"layout is 'rows'", "none, concatenated, interleaved"});
  refused("silu/none beta=1", {"alpha=, limit= and up_offset="});
  refused("silu/none limit", {"alpha=, limit= and up_offset="});
  refused("silu/none limit=1x", {"limit is '1x'", "a number"});
}

}  // namespace
}  // namespace moegemm
