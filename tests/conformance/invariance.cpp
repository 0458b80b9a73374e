#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "moegemm/info.h"
#include "testing/device/device_problem.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

using Bytes = std::vector<unsigned char>;

/// Runs `workers` calls one after another, the last one first: legal by the interface, fatal for
/// work whose parts wait for each other.
class SerialExecutor final : public Executor {
 public:
  explicit SerialExecutor(int workers) : workers_(workers) {}
  int concurrency() const override { return workers_; }
  void run(int workers, const std::function<void(int)>& work) override {
    for (int worker = workers - 1; worker >= 0; --worker) work(worker);
  }

 private:
  int workers_;
};

/// Empty when the backend or the kernel does not take this problem.
Bytes run_bits(const Target& target, const HostProblem& host, const std::string& kernel = "",
               Executor* executor = nullptr) {
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  if (!kernel.empty()) options.config.emplace().kernel = kernel;
  BorrowedMemory lender(*target.memory);
  ExecutionContext context = lender.context();
  context.executor = executor;
  try {
    const Plan planned = device.call(options, context);
    if (planned.product().kernel_name != kernel && !kernel.empty()) return {};
  } catch (const Error& error) {
    if (target.may_throw(error, kernel)) return {};
    throw;
  }
  target.memory->synchronize();
  return device.output();
}

/// The problem that has only these positions (ascending) of another one; no permutation.
HostProblem select_positions(const HostProblem& whole, const std::vector<std::int64_t>& positions) {
  HostProblem part = whole;
  part.spec.m_sizes.assign(whole.spec.experts(), 0);
  part.spec.rows = static_cast<std::int64_t>(positions.size());
  const HostMatrix& from = whole.op == Op::kForward ? whole.x : whole.dy;
  HostMatrix rows = poisoned_matrix(from.dtype, part.spec.rows, from.cols, 0, 0);
  for (std::size_t i = 0; i < positions.size(); ++i) {
    ++part.spec.m_sizes[whole.owners[positions[i]]];
    for (std::int64_t c = 0; c < from.cols; ++c) {
      rows.set(static_cast<std::int64_t>(i), c, from.row(positions[i])[c]);
    }
  }
  (whole.op == Op::kForward ? part.x : part.dy) = std::move(rows);
  part.out = poisoned_matrix(whole.out_dtype, part.spec.rows, whole.out.cols, 0, 0);
  return part;
}

/// The same rows with one side in flat order; the result's row for a position moves with it if the
/// product scatters.
HostProblem permute(const HostProblem& whole, Permutation permutation, std::uint64_t seed) {
  HostProblem moved = build_problem(
      [&] {
        ProblemCase spec = whole.spec;
        spec.permutation = permutation;
        return spec;
      }(),
      whole.op, whole.dtype, seed);
  moved.w = whole.w;
  moved.bias = whole.bias;
  const bool forward = whole.op == Op::kForward;
  const HostMatrix& from = forward ? whole.x : whole.dy;
  HostMatrix& to = forward ? moved.x : moved.dy;
  for (std::int64_t r = 0; r < whole.spec.rows; ++r) {
    const std::int64_t row = forward ? moved.x_row(r) : moved.dy_row(r);
    for (std::int64_t c = 0; c < from.cols; ++c) to.set(row, c, from.row(r)[c]);
  }
  return moved;
}

bool same_row(const HostProblem& host, const Bytes& a, std::int64_t row_a, const Bytes& b,
              std::int64_t row_b) {
  const std::int64_t bytes = host.out.cols * size_bytes(host.out_dtype);
  return std::memcmp(a.data() + row_a * bytes, b.data() + row_b * bytes, bytes) == 0;
}

/// What is multiplied, and how.
struct Numbers {
  DType dtype;
  bool tf32 = false;
  std::string name() const { return tf32 ? "tf32" : to_string(dtype); }
};

std::vector<Numbers> numbers_of(const Target& target) {
  std::vector<Numbers> all = {{DType::kBFloat16}, {DType::kFloat16}, {DType::kFloat32}};
  if (target.on_gpu()) all.push_back({DType::kFloat32, true});
  return all;
}

ProblemCase invariance_case(const Numbers& numbers, std::int64_t n, std::int64_t k) {
  ProblemCase c;
  c.name = "Invariance";
  c.tf32 = numbers.tf32;
  c.m_sizes = {37, 0, 150, 1, 260, 64};
  c.rows = 512;
  c.n = n;
  c.k = k;
  return c;
}

void expect_batch_invariance(const Target& target, const HostProblem& whole) {
  const Bytes expected = run_bits(target, whole);
  if (expected.empty()) GTEST_SKIP() << target.name() << " leaves this problem to another backend";

  std::vector<std::vector<std::int64_t>> batches;
  for (const std::int64_t alone : {0, 36, 37, 100, 186, 187, 188, 300, 447, 448, 511}) {
    batches.push_back({alone});
  }
  for (const std::int64_t step : {2, 3, 7, 16, 31, 64}) {
    batches.emplace_back();
    for (std::int64_t r = step / 2; r < 512; r += step) batches.back().push_back(r);
  }
  for (const std::int64_t count : {5, 8, 9, 17, 33, 65, 129, 200, 256}) {
    std::vector<std::int64_t> run(count);
    std::iota(run.begin(), run.end(), 188);  // of the largest expert
    batches.push_back(std::move(run));
  }
  for (const auto& positions : batches) {
    const HostProblem part = select_positions(whole, positions);
    const Bytes bits = run_bits(target, part);
    ASSERT_FALSE(bits.empty());
    for (std::size_t i = 0; i < positions.size(); ++i) {
      ASSERT_TRUE(same_row(whole, bits, static_cast<std::int64_t>(i), expected, positions[i]))
          << "the bits of position " << positions[i] << " change in a batch of "
          << positions.size();
    }
  }

  for (const Permutation permutation : {Permutation::kX, Permutation::kY}) {
    ProblemCase flat = whole.spec;
    flat.permutation = permutation;
    if (!applies(flat, whole.op, whole.dtype)) continue;
    const HostProblem moved = permute(whole, permutation, 5);
    const Bytes bits = run_bits(target, moved);
    for (std::int64_t r = 0; r < whole.spec.rows && !bits.empty(); ++r) {
      const std::int64_t row = moved.scatters() ? moved.gather_indices[r] : r;
      ASSERT_TRUE(same_row(whole, bits, row, expected, r))
          << "the bits of position " << r << " change with " << to_string(permutation);
    }
  }

  int kernels_run = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.backend != target.backend || kernel.op != whole.op) continue;
    // An activation has the same bits fused and in a pass after the product.
    const Bytes bits = run_bits(target, whole, kernel.name);
    if (bits.empty()) continue;
    ++kernels_run;
    ASSERT_EQ(bits, expected) << "the bits change with kernel " << kernel.name;
  }
  ::testing::Test::RecordProperty("kernels_run", kernels_run);

  if (target.memory->device().type == DeviceType::kCpu) {
    for (const int workers : {1, 3, 16}) {
      SerialExecutor executor(workers);
      ASSERT_EQ(run_bits(target, whole, "", &executor), expected)
          << "the bits change with " << workers << " workers";
    }
  }
}

/// dW of segments with rows of zeros after them: the bits are those of the rows themselves, so
/// what a row is added up with depends on its place in the segment alone.
void expect_zero_rows_to_change_nothing(const Target& target, const Numbers& numbers,
                                        std::int64_t first_rows) {
  ProblemCase spec = invariance_case(numbers, 136, 264);
  spec.m_sizes.insert(spec.m_sizes.begin(), first_rows);
  spec.rows += first_rows;
  spec.output_in_fp32 = true;  // rounded to 16 bits, most other sums would look the same
  const HostProblem host = build_problem(spec, Op::kDw, numbers.dtype, run_seed());
  const Bytes expected = run_bits(target, host);
  if (expected.empty()) GTEST_SKIP() << target.name() << " leaves this problem to another backend";

  const std::vector<std::int64_t> zero_rows = {40, 27, 5, 10, 31, 3, 16};
  ProblemCase longer = spec;
  for (std::size_t e = 0; e < zero_rows.size(); ++e) longer.m_sizes[e] += zero_rows[e];
  longer.rows += std::accumulate(zero_rows.begin(), zero_rows.end(), std::int64_t{0});
  HostProblem padded = build_problem(longer, Op::kDw, numbers.dtype, run_seed() + 1);
  std::int64_t from = 0;
  std::int64_t to = 0;
  for (std::size_t e = 0; e < zero_rows.size(); ++e) {
    for (std::int64_t r = 0; r < longer.m_sizes[e]; ++r, ++to) {
      const bool copied = r < spec.m_sizes[e];
      for (std::int64_t c = 0; c < host.dy.cols; ++c) {
        padded.dy.set(to, c, copied ? host.dy.row(from)[c] : 0.0f);
      }
      for (std::int64_t c = 0; copied && c < host.x.cols; ++c) {
        padded.x.set(to, c, host.x.row(from)[c]);
      }
      from += copied ? 1 : 0;
    }
  }
  ASSERT_EQ(run_bits(target, padded), expected);
}

void expect_determinism(const Target& target, Op op, const Numbers& numbers,
                        Permutation permutation) {
  ProblemCase spec = invariance_case(numbers, 136, 72);
  spec.permutation = permutation;
  spec.multiply = permutation == Permutation::kY;
  spec.topk = permutation == Permutation::kNone ? 1 : 4;
  const HostProblem host = build_problem(spec, op, numbers.dtype, run_seed());
  const Bytes first = run_bits(target, host);
  if (first.empty()) GTEST_SKIP() << target.name() << " leaves this problem to another backend";
  for (int repeat = 0; repeat < 5; ++repeat) {
    ASSERT_EQ(run_bits(target, host), first) << "repetition " << repeat;
  }
}

}  // namespace

void add_invariance_tests() {
  const std::pair<std::int64_t, std::int64_t> shapes[] = {
      {136, 264}, {64, 64}, {33, 1000}, {17, 53}, {200, 24}};
  for (const Target& target : targets()) {
    for (const Numbers& numbers : numbers_of(target)) {
      for (const Op op : {Op::kForward, Op::kDx}) {
        for (const auto& [n, k] : shapes) {
          if (trimmed_run() && n != 17) continue;
          add_test(target.name() + "/BatchInvariance",
                   std::string(to_string(op)) + "_" + numbers.name() + "_N" + std::to_string(n) +
                       "K" + std::to_string(k),
                   [&target, numbers, op, n = n, k = k] {
                     expect_batch_invariance(target, build_problem(invariance_case(numbers, n, k),
                                                                   op, numbers.dtype, run_seed()));
                   });
        }
      }
      for (const Op op : {Op::kForward, Op::kDx}) {
        ProblemCase biased =
            trimmed_run() ? invariance_case(numbers, 17, 53) : invariance_case(numbers, 136, 264);
        biased.name = "InvarianceBiased";
        biased.bias = true;
        add_test(target.name() + "/BatchInvariance",
                 std::string(to_string(op)) + "_" + numbers.name() + "_biased",
                 [&target, numbers, op, biased] {
                   expect_batch_invariance(target,
                                           build_problem(biased, op, numbers.dtype, run_seed()));
                 });
        for (const GateLayout layout : {GateLayout::kConcatenated, GateLayout::kInterleaved}) {
          ProblemCase activated =
              trimmed_run() ? invariance_case(numbers, 48, 88) : invariance_case(numbers, 144, 264);
          activated.name = "InvarianceActivated";
          activated.bias = true;
          activated.activation = Activation{.layout = layout};
          add_test(target.name() + "/BatchInvariance",
                   std::string(to_string(op)) + "_" + numbers.name() + "_" + to_string(layout),
                   [&target, numbers, op, activated] {
                     expect_batch_invariance(
                         target, build_problem(activated, op, numbers.dtype, run_seed()));
                   });
        }
      }
      for (const std::int64_t first_rows : {0, 3, 16, 17, 31, 33}) {
        add_test(target.name() + "/BatchInvariance",
                 std::string("dW_") + numbers.name() + "_" + std::to_string(first_rows),
                 [&target, numbers, first_rows] {
                   expect_zero_rows_to_change_nothing(target, numbers, first_rows);
                 });
      }
      for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
        for (const Permutation permutation :
             {Permutation::kNone, Permutation::kX, Permutation::kY}) {
          add_test(target.name() + "/Determinism",
                   std::string(to_string(op)) + "_" + numbers.name() + "_" + to_string(permutation),
                   [&target, op, numbers, permutation] {
                     expect_determinism(target, op, numbers, permutation);
                   });
        }
      }
    }
  }
}

}  // namespace moegemm::testing
