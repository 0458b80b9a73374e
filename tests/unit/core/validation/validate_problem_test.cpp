#include <gtest/gtest.h>

#include <cstdint>

#include "core/validation/validate.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// A Problem written by hand instead of described from tensors.
class ValidateProblem : public ::testing::Test {
 protected:
  ValidateProblem() {
    problem.experts = problem.n = problem.k = 4;
    problem.rows = 8;
  }
  void expect_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { validate(problem); });
  }
  Problem problem;
};

TEST_F(ValidateProblem, SizesHaveLowerBounds) {
  EXPECT_NO_THROW(validate(problem));
  problem.rows = 0;
  EXPECT_NO_THROW(validate(problem));
  problem.rows = -1;
  expect_refused(ErrorKind::kInvalidValue, {"M is -1", "at least 0"});
  problem.k = 0;
  expect_refused(ErrorKind::kInvalidValue, {"K is 0", "at least 1"});
  problem.n = 0;
  expect_refused(ErrorKind::kInvalidValue, {"N is 0", "at least 1"});
  problem.experts = 0;
  expect_refused(ErrorKind::kInvalidValue, {"E is 0", "at least 1"});
}

TEST_F(ValidateProblem, TopkFitsThe32BitsThatKernelsDivideBy) {
  problem.topk = std::int64_t{1} << 32;
  expect_refused(ErrorKind::kInvalidValue, {"topk is 4294967296", "at most 2147483647"});
  problem.topk = 0;
  expect_refused(ErrorKind::kInvalidValue, {"topk is 0", "at least 1"});
}

TEST_F(ValidateProblem, OnlyAPermutedDwIsPresorted) {
  problem.presorted = true;
  expect_refused(ErrorKind::kInvalidValue, {"presorted=true", "forward"});
  problem.op = Op::kDw;
  expect_refused(ErrorKind::kInvalidValue, {"presorted=true", "dW with none"});
  problem.permutation = Permutation::kX;
  EXPECT_NO_THROW(validate(problem));
}

TEST_F(ValidateProblem, OnlyForwardAndDxMayHavePendingRows) {
  problem.rows_pending = true;
  EXPECT_NO_THROW(validate(problem));
  problem.op = Op::kDx;
  EXPECT_NO_THROW(validate(problem));
  problem.op = Op::kDw;
  expect_refused(ErrorKind::kInvalidValue, {"rows_pending=true", "dW"});
}

TEST_F(ValidateProblem, DtypesAreChecked) {
  problem.weights_dtype = DType::kFloat16;
  expect_refused(ErrorKind::kInvalidType,
                 {"weights_dtype is fp16", "fp32 and bf16, the dtype of the problem"});
  problem.index_dtype = DType::kFloat32;
  expect_refused(ErrorKind::kInvalidType, {"index_dtype is fp32", "int32 and int64"});
  problem.sizes_dtype = DType::kFloat16;
  expect_refused(ErrorKind::kInvalidType, {"sizes_dtype is fp16", "int32 and int64"});
  problem.out_dtype = DType::kFloat16;
  expect_refused(ErrorKind::kInvalidType,
                 {"out_dtype is fp16", "fp32 and bf16, the dtype of the problem"});
  problem.dtype = DType::kInt32;
  expect_refused(ErrorKind::kInvalidType, {"dtype is int32", "bf16, fp16 and fp32"});
}

TEST_F(ValidateProblem, AccumulateNeedsAFloat32Dw) {
  problem.op = Op::kDw;
  problem.accumulate = true;
  expect_refused(ErrorKind::kInvalidType, {"out_dtype is bf16", "accumulate", "fp32"});
  problem.out_dtype = DType::kFloat32;
  EXPECT_NO_THROW(validate(problem));
}

TEST_F(ValidateProblem, ByteCountsFitIn64Bits) {
  problem.n = problem.k = 8;
  problem.rows = (std::int64_t{1} << 60) - 1;
  expect_refused(ErrorKind::kInvalidValue, {"bytes of M * max(N, K)", "64 bits"});
  problem.rows = 8;
  problem.experts = std::int64_t{1} << 55;
  expect_refused(ErrorKind::kInvalidValue, {"bytes of E * N * K", "64 bits"});
}

TEST_F(ValidateProblem, ElementCountsFitIn64Bits) {
  problem.rows = std::int64_t{1} << 61;
  problem.n = 8;
  expect_refused(ErrorKind::kInvalidValue, {"M * max(N, K)", "64 bits"});
  problem.rows = 8;
  problem.experts = problem.n = problem.k = std::int64_t{1} << 31;
  expect_refused(ErrorKind::kInvalidValue, {"E * N * K", "64 bits"});
  problem.experts = 256;
  problem.n = 4096;
  problem.k = 7168;
  EXPECT_NO_THROW(validate(problem)) << "7.5e9 weights are a real layer";
}

TEST_F(ValidateProblem, SlotsAreThoseOfWholeTokensAndOfIndices) {
  problem.topk = 2;
  problem.slots = 6;
  expect_refused(ErrorKind::kInvalidValue, {"slots is 6 with none", "-1 without indices"});
  problem.permutation = Permutation::kX;
  EXPECT_NO_THROW(validate(problem));
  problem.slots = 7;
  expect_refused(ErrorKind::kInvalidValue, {"slots is 7", "a multiple of topk = 2"});
}

TEST_F(ValidateProblem, RouterWeightsInFlatOrderNeedSegmentsThatFollowOneAnother) {
  problem.permutation = Permutation::kY;
  problem.multiply = true;
  EXPECT_NO_THROW(validate(problem));
  problem.segments = Segments::kPlaced;
  expect_refused(ErrorKind::kInvalidValue, {"with starts", "follow one another"});
}

}  // namespace
}  // namespace moegemm
