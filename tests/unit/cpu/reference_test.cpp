#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "moegemm/moegemm.h"

namespace moegemm {
namespace {

TensorView floats(const std::vector<float>& data, std::int64_t rows, std::int64_t cols) {
  return TensorView::matrix(data.data(), DType::kFloat32, rows, cols);
}

TensorView indices(const std::vector<std::int32_t>& data) {
  return TensorView::vector(data.data(), DType::kInt32, static_cast<std::int64_t>(data.size()));
}

// Two experts, N = 2, K = 2. W_0 = [[1, 2], [3, 4]], W_1 = [[-1, 0], [0, 10]].
class ReferenceByHand : public ::testing::Test {
 protected:
  std::vector<float> w_ = {1, 2, 3, 4, -1, 0, 0, 10};
  TensorView w() const { return TensorView::stack(w_.data(), DType::kFloat32, 2, 2, 2); }
  GemmOptions options() const {
    GemmOptions result;
    result.backend = BackendKind::kReference;
    return result;
  }
};

TEST_F(ReferenceByHand, ForwardMultipliesEachSegmentByItsExpert) {
  const std::vector<float> x = {1, 1, 2, 0, 5, 7};
  const std::vector<std::int32_t> sizes = {2, 1};
  std::vector<float> y(6, -99);
  RoutingView routing;
  routing.m_sizes = indices(sizes);
  forward(floats(x, 3, 2), w(), floats(y, 3, 2), routing, options());
  EXPECT_EQ(y, (std::vector<float>{3, 7, 2, 6, -5, 70}));
}

}  // namespace
}  // namespace moegemm
