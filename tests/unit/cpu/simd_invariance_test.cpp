#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "unit/cpu/simd_case.h"

namespace moegemm::cpu::simd {
namespace {

/// Runs the workers one after another on the calling thread.
class SerialExecutor final : public Executor {
 public:
  explicit SerialExecutor(int workers) : workers_(workers) {}
  int concurrency() const override { return workers_; }
  void run(int workers, const std::function<void(int)>& work) override {
    for (int worker = 0; worker < workers; ++worker) work(worker);
  }

 private:
  int workers_;
};

class SimdInvariance : public ::testing::TestWithParam<InstructionSet> {};

/// Row `row` of a large batch against the same row alone with its expert.
TEST_P(SimdInvariance, ARowHasTheSameBitsAloneAndInAnyBatch) {
  const Backend& backend = backend_for(GetParam());
  for (Op op : {Op::kForward, Op::kDx}) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      CaseShape shape;
      shape.op = op;
      shape.dtype = dtype;
      shape.out_dtype = DType::kFloat32;
      shape.n = op == Op::kDx ? 1411 : 70;
      shape.k = op == Op::kForward ? 1411 : 200;
      shape.sizes = {150};
      const Case whole(shape);
      const std::vector<float> batch = whole.run(backend, backend.choose(whole.problem()));
      for (std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 29}) {
        CaseShape part_shape = shape;
        part_shape.sizes = {rows};
        Case moved(part_shape);
        moved.w() = const_cast<Case&>(whole).w();
        const std::int64_t element = size_bytes(dtype);
        for (std::int64_t first : {0, 50, 150 - 29}) {
          const auto copy_rows = [&](const std::vector<std::byte>& from, std::vector<std::byte>& to,
                                     std::int64_t stride) {
            std::memcpy(to.data(), from.data() + first * stride * element,
                        static_cast<std::size_t>(rows * stride * element));
          };
          copy_rows(const_cast<Case&>(whole).x(), moved.x(), moved.x_stride());
          copy_rows(const_cast<Case&>(whole).dy(), moved.dy(), moved.dy_stride());
          for (int kernel : feasible_kernels(backend, moved.problem())) {
            const std::vector<float> alone = moved.run(backend, kernel);
            ASSERT_EQ(std::memcmp(alone.data(), batch.data() + first * whole.out_cols(),
                                  alone.size() * sizeof(float)),
                      0)
                << backend.kernels()[kernel].name << " " << to_string(dtype) << ": " << rows
                << " rows from row " << first;
          }
        }
      }
    }
  }
}

TEST_P(SimdInvariance, TheNumberOfThreadsDoesNotChangeTheBits) {
  const Backend& backend = backend_for(GetParam());
  for (Op op : {Op::kForward, Op::kDx, Op::kDw}) {
    CaseShape shape;
    shape.op = op;
    shape.out_dtype = DType::kFloat32;
    shape.n = 260;
    shape.k = 330;
    shape.sizes = {3, 400, 0, 77};
    const Case c(shape);
    for (int kernel : feasible_kernels(backend, c.problem())) {
      SerialExecutor one(1);
      ExecutionContext context;
      context.executor = &one;
      const std::vector<float> expected = c.run(backend, kernel, context);
      for (int workers : {2, 7, 64}) {
        SerialExecutor many(workers);
        context.executor = &many;
        EXPECT_EQ(c.run(backend, kernel, context), expected)
            << workers << " workers, " << backend.kernels()[kernel].name;
      }
      EXPECT_EQ(c.run(backend, kernel), expected) << "default executor";
    }
  }
}

TEST_P(SimdInvariance, RepeatedCallsGiveTheSameBits) {
  const Backend& backend = backend_for(GetParam());
  CaseShape shape;
  shape.op = Op::kDw;
  shape.out_dtype = DType::kFloat32;
  shape.n = 100;
  shape.k = 90;
  shape.sizes = {1, 300, 20};
  const Case c(shape);
  const std::vector<float> expected = c.run(backend, backend.choose(c.problem()));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(c.run(backend, backend.choose(c.problem())), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(, SimdInvariance, ::testing::ValuesIn(usable_instruction_sets()),
                         [](const auto& each) { return std::string(to_string(each.param)); });

}  // namespace
}  // namespace moegemm::cpu::simd
