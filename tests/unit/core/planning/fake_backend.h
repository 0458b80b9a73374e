#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/planning/kernel_step.h"
#include "core/refusal.h"

namespace moegemm::testing {

/// A backend that never runs: it has the kernels it is given, which refuse N below their columns.
class FakeBackend final : public Backend {
 public:
  FakeBackend(BackendKind kind, std::vector<KernelInfo> kernels)
      : kind_(kind), kernels_(std::move(kernels)) {}

  BackendKind kind() const override { return kind_; }
  std::string unavailable(Device) const override { return unavailable_reason; }
  std::span<const KernelInfo> kernels() const override { return kernels_; }
  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (kernel.op != problem.op) return join(kernel.name, " computes ", to_string(kernel.op));
    if (problem.activation && kernel.name != fusing_kernel) return "applies no activation";
    if (problem.op == Op::kDw && problem.multiply && !multiplies) return "multiplies nothing";
    if (std::string reason = refuse_weights(problem, kernel); !reason.empty()) return reason;
    if (problem.n < kernel.tile.columns) return join("N = ", problem.n, " is too narrow");
    return {};
  }
  Step plan_with(const Problem& problem, int kernel) const override {
    ++plans_made;
    planned_rows_pending = problem.rows_pending;
    EXPECT_EQ(refuse(problem, kernels_[kernel]), "") << "an infeasible kernel is planned";
    return kernel_step(kernels_[kernel], kernel, 1);
  }
  int choose(const Problem& problem) const override {
    for (std::size_t i = 0; i < kernels_.size(); ++i) {
      if (refuse(problem, kernels_[i]).empty()) return static_cast<int>(i);
    }
    ADD_FAILURE() << "choose was called with nothing feasible";
    return 0;
  }
  void launch(const Step&, const Problem&, const Operands&,
              const ExecutionContext&) const override {}

  bool fusing_is_faster(const Problem&) const override { return fuses_faster; }
  bool gathering_first_is_faster(const Problem&) const override { return gathers_first; }
  bool scales_first(const Problem&) const override { return scales; }
  bool aligning_first_is_faster(const Problem&) const override { return aligns_first; }
  bool dequantising_first_is_faster(const Problem&) const override { return dequantises_first; }

  mutable std::atomic<bool> planned_rows_pending = false;  ///< of the last problem with a step
  std::string unavailable_reason;
  std::string fusing_kernel;
  bool fuses_faster = true;
  bool gathers_first = false;
  bool aligns_first = false;
  bool dequantises_first = false;
  bool scales = false;     ///< X in a pass of its own, wherever there is memory
  bool multiplies = true;  ///< its dW kernels can
  mutable std::atomic<int> plans_made = 0;

 private:
  BackendKind kind_;
  std::vector<KernelInfo> kernels_;
};

}  // namespace moegemm::testing
