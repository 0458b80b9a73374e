#include "moegemm/tensor.h"

#include <gtest/gtest.h>

namespace moegemm {
namespace {

TEST(TensorView, DefaultConstructedMeansNotGiven) {
  EXPECT_FALSE(TensorView{}.given());
  EXPECT_EQ(TensorView{}.numel(), 0);
  EXPECT_EQ(to_string(TensorView{}), "not given");
}

TEST(TensorView, RowStrideZeroMeansDenseRows) {
  EXPECT_EQ(TensorView::matrix(nullptr, DType::kFloat32, 3, 5).row_stride, 5);
  EXPECT_EQ(TensorView::matrix(nullptr, DType::kFloat32, 3, 5, 8).row_stride, 8);
  EXPECT_EQ(TensorView::stack(nullptr, DType::kFloat32, 2, 3, 5).row_stride, 5);
}

TEST(TensorView, CountsElementsBeyondThirtyTwoBits) {
  const auto w = TensorView::stack(nullptr, DType::kBFloat16, 256, 4096, 7168);
  EXPECT_EQ(w.numel(), std::int64_t{256} * 4096 * 7168);
}

TEST(TensorView, PrintsDtypeShapeStrideAndDevice) {
  EXPECT_EQ(to_string(TensorView::vector(nullptr, DType::kInt64, 4)), "int64[4] on cpu");
  EXPECT_EQ(to_string(TensorView::matrix(nullptr, DType::kBFloat16, 8, 64)), "bf16[8, 64] on cpu");
  EXPECT_EQ(to_string(TensorView::matrix(nullptr, DType::kFloat16, 8, 64, 72)),
            "fp16[8, 64] with row stride 72 on cpu");
  EXPECT_EQ(to_string(TensorView::stack(nullptr, DType::kFloat32, 2, 3, 4, 0,
                                        Device{DeviceType::kCuda, 1})),
            "fp32[2, 3, 4] on cuda:1");
}

TEST(TensorView, PrintsNoMoreExtentsThanThereAre) {
  TensorView view = TensorView::matrix(nullptr, DType::kInt32, 8, 64);
  view.rank = 7;
  EXPECT_EQ(to_string(view), "int32 of rank 7 on cpu");
  view.rank = -1;
  EXPECT_EQ(to_string(view), "int32 of rank -1 on cpu");
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_bytes(DType::kBFloat16), 2);
  EXPECT_EQ(size_bytes(DType::kFloat16), 2);
  EXPECT_EQ(size_bytes(DType::kFloat32), 4);
  EXPECT_EQ(size_bytes(DType::kInt32), 4);
  EXPECT_EQ(size_bytes(DType::kInt64), 8);
  EXPECT_STREQ(to_string(DType::kInt32), "int32");
  EXPECT_TRUE(is_floating(DType::kBFloat16));
  EXPECT_FALSE(is_floating(DType::kInt32));
  EXPECT_TRUE(is_index(DType::kInt64));
  EXPECT_FALSE(is_index(DType::kFloat32));
}

}  // namespace
}  // namespace moegemm
