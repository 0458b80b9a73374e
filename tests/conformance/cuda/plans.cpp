#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "conformance/driver/gpu_problem.h"
#include "conformance/suites.h"
#include "testing/numerics/random.h"

/// Plans of several steps: what they compute, and what runs where there is no memory for them.
namespace moegemm::testing {
namespace {

using Bytes = std::vector<unsigned char>;

/// Has nothing to lend, and says so as an allocator does.
class EmptyPool final : public MemorySupport {
 public:
  void* allocate(std::int64_t, Device) override { throw std::runtime_error("out of memory"); }
};

struct Run {
  Plan plan;
  Bytes bits;
};

Run run(const Target& target, const HostProblem& host, MemorySupport* lender) {
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  ExecutionContext context = target.memory->context();
  context.memory = lender;
  Run run{device.call(options, context), {}};
  target.memory->synchronize();
  EXPECT_EQ(device.trespass(), "") << to_string(run.plan);
  run.bits = device.output();
  return run;
}

/// A dW whose other operand has the 4096 columns from which on a copy in order is faster.
ProblemCase wide_case(Permutation permutation) {
  ProblemCase c = busy_case(permutation);
  c.name = "Wide";
  (permutation == Permutation::kX ? c.n : c.k) = 4096;
  c.multiply = false;
  return c;
}

void expect_copy_in_order_keeps_the_bits(const Target& target, Permutation permutation) {
  const HostProblem host =
      build_problem(wide_case(permutation), Op::kDw, DType::kBFloat16, run_seed());
  BorrowedMemory lender(*target.memory);
  const Run copied = run(target, host, &lender);
  const StepKind pass = permutation == Permutation::kX ? StepKind::kGatherX : StepKind::kGatherDy;
  if (!copied.plan.has(pass)) GTEST_SKIP() << target.name() << " gathers inside the product";
  EXPECT_GT(copied.plan.workspace_bytes, 0);
  EmptyPool empty;
  for (MemorySupport* none :
       {static_cast<MemorySupport*>(&empty), static_cast<MemorySupport*>(nullptr)}) {
    const Run gathered = run(target, host, none);
    EXPECT_EQ(gathered.plan.steps.size(), 1u) << to_string(gathered.plan);
    EXPECT_EQ(gathered.plan.workspace_bytes, 0);
    EXPECT_EQ(gathered.bits, copied.bits) << to_string(gathered.plan);
  }
}

/// Rows of odd length, and enough of them for copies to pay.
void expect_aligned_copies_keep_the_bits(const Target& target, Op op, DType dtype,
                                         Permutation permutation) {
  ProblemCase c = busy_case(permutation);
  c.name = "Odd";
  c.n = 131;
  c.k = 205;
  c.multiply = c.multiply && op != Op::kDw;
  const HostProblem host = build_problem(c, op, dtype, run_seed());
  BorrowedMemory lender(*target.memory);
  const Run copied = run(target, host, &lender);
  if (!copied.plan.has(StepKind::kTrim)) GTEST_SKIP() << target.name() << " copies nothing here";
  const Run element_wise = run(target, host, nullptr);
  EXPECT_EQ(element_wise.plan.steps.size(), 1u) << to_string(element_wise.plan);
  EXPECT_EQ(element_wise.bits, copied.bits) << to_string(copied.plan);
}

/// What the host scales gives the bits of what a pass scales.
void expect_weighted_dw_is_dw_of_scaled_rows(const Target& target, DType dtype) {
  const ProblemCase spec = busy_case(Permutation::kY);
  const HostProblem host = build_problem(spec, Op::kDw, dtype, run_seed());
  BorrowedMemory lender(*target.memory);
  const Run weighted = run(target, host, &lender);
  EXPECT_TRUE(weighted.plan.has(StepKind::kScaleX)) << to_string(weighted.plan);
  EXPECT_EQ(weighted.plan.product().backend, target.backend);

  HostProblem scaled = host;
  scaled.spec.multiply = false;
  for (std::int64_t r = 0; r < spec.rows; ++r) {
    const bool counts = host.owners[r] >= 0 && host.index_valid(r);
    for (std::int64_t c = 0; c < host.x.cols; ++c) {
      scaled.x.set(r, c, counts ? static_cast<float>(host.scale(r)) * host.x.row(r)[c] : 0.0f);
    }
  }
  EXPECT_EQ(run(target, scaled, &lender).bits, weighted.bits) << to_string(weighted.plan);
  EmptyPool empty;
  EXPECT_THROW(run(target, host, &empty), std::runtime_error)
      << "want of memory must not change which operand is rounded";
}

/// The product reads the scaled copy, whose rows are aligned.
void expect_weighted_dw_of_misaligned_rows_is_as_good(const Target& target) {
  const HostProblem host =
      build_problem(busy_case(Permutation::kY), Op::kDw, DType::kBFloat16, run_seed());
  HostProblem misaligned = host;
  misaligned.x = poisoned_matrix(host.x.dtype, host.x.rows, host.x.cols, 3, 1);
  for (std::int64_t r = 0; r < host.x.rows; ++r) {
    for (std::int64_t c = 0; c < host.x.cols; ++c) misaligned.x.set(r, c, host.x.row(r)[c]);
  }
  BorrowedMemory lender(*target.memory);
  EXPECT_EQ(run(target, misaligned, &lender).bits, run(target, host, &lender).bits);
}

/// For the one backend that runs such rows.
void add_alignment_tests(const Target& target) {
  for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
        add_test(target.name() + "/Plan",
                 std::string("AlignedCopiesKeepTheBits_") + to_string(op) + "_" + to_string(dtype) +
                     "_" + to_string(permutation),
                 [target, op, dtype, permutation] {
                   expect_aligned_copies_keep_the_bits(target, op, dtype, permutation);
                 });
      }
    }
  }
}

}  // namespace

void add_plan_tests() {
  for (const Target& target : gpu_targets()) {
    for (const Permutation permutation : {Permutation::kX, Permutation::kY}) {
      add_test(target.name() + "/Plan",
               std::string("CopyInOrderKeepsTheBits_") + to_string(permutation),
               [target, permutation] { expect_copy_in_order_keeps_the_bits(target, permutation); });
    }
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      add_test(target.name() + "/Plan",
               std::string("WeightedDwIsDwOfScaledRows_") + to_string(dtype),
               [target, dtype] { expect_weighted_dw_is_dw_of_scaled_rows(target, dtype); });
    }
    if (target.backend == BackendKind::kSm80) add_alignment_tests(target);
    add_test(target.name() + "/Plan", "WeightedDwOfMisalignedRowsIsAsGood",
             [target] { expect_weighted_dw_of_misaligned_rows_is_as_good(target); });
  }
}

}  // namespace moegemm::testing
