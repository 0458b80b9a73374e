#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/validation/validate.h"
#include "unit/core/expect_refusal.h"

namespace moegemm::testing {

/// A valid call of each op: E = 3, N = 4, K = 5, T = 6, topk = 2, M = 12. Tests break one thing.
class ValidCall : public ::testing::Test {
 protected:
  ValidCall() {
    routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 3);
    routing.gather_indices = TensorView::vector(indices.data(), DType::kInt32, 12);
    routing.router_weights = TensorView::vector(weights.data(), DType::kFloat32, 12);
    routing.topk = 2;
  }

  Call forward() const { return described_call(Op::kForward, x, w, y); }
  Call dx() const { return described_call(Op::kDx, dy, w, dx_out); }
  Call dw() const { return described_call(Op::kDw, dy, x, dw_out); }
  Call described_call(Op op, const TensorView& first, const TensorView& second,
                      const TensorView& out) const {
    return place(described(op, first, second, out, routing, options), first, second, out, routing,
                 options);
  }

  void expect_forward_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { forward(); });
  }
  void expect_dx_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { dx(); });
  }
  void expect_dw_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { dw(); });
  }

  static constexpr DType kType = DType::kFloat32;
  std::vector<float> x_data = std::vector<float>(12 * 8);
  std::vector<float> w_data = std::vector<float>(3 * 4 * 5);
  std::vector<float> y_data = std::vector<float>(12 * 8);
  std::vector<float> dy_data = std::vector<float>(12 * 4);
  std::vector<float> out_data = std::vector<float>(12 * 8);
  // Longer than their views: an output laid over one of them must not reach into the next.
  std::vector<std::int32_t> sizes = std::vector<std::int32_t>(64, 4);
  std::vector<std::int32_t> indices = std::vector<std::int32_t>(64);
  std::vector<float> weights = std::vector<float>(64);

  TensorView x = TensorView::matrix(x_data.data(), kType, 12, 5);
  TensorView x_tokens = TensorView::matrix(x_data.data(), kType, 6, 5);
  TensorView w = TensorView::stack(w_data.data(), kType, 3, 4, 5);
  TensorView y = TensorView::matrix(y_data.data(), kType, 12, 4);
  TensorView dy = TensorView::matrix(dy_data.data(), kType, 12, 4);
  TensorView dx_out = TensorView::matrix(out_data.data(), kType, 12, 5);
  TensorView dw_out = TensorView::stack(out_data.data(), kType, 3, 4, 5);
  RoutingView routing;
  GemmOptions options;
};

}  // namespace moegemm::testing
