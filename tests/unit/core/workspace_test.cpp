#include "core/workspace.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// Lends at most so many bytes, and has a way of its own to say no.
class Lender final : public MemorySupport {
 public:
  void* allocate(std::int64_t bytes, Device) override {
    asked.push_back(bytes);
    if (bytes <= most_bytes) return memory.data();
    if (throws) throw std::runtime_error("the pool is dry");
    return nullptr;
  }

  std::int64_t most_bytes = 0;
  bool throws = false;
  std::vector<std::int64_t> asked;
  std::vector<std::byte> memory = std::vector<std::byte>(1024);
};

class WorkspaceTest : public ::testing::Test {
 protected:
  WorkspaceTest() {
    problem.experts = problem.n = problem.k = problem.rows = 1;
    context.memory = &lender;
  }

  static Planned plan_of(std::int64_t bytes) {
    Planned planned;
    planned.plan.steps = Steps({Step{}});
    planned.plan.workspace_bytes = bytes;
    return planned;
  }

  Workspace borrow(Planned& planned, std::int64_t smaller) {
    return borrow_workspace(planned, problem, context, [&] {
      ++lowered;
      return plan_of(smaller);
    });
  }

  Problem problem;
  Lender lender;
  ExecutionContext context;
  int lowered = 0;
};

TEST_F(WorkspaceTest, APlanWithoutWorkspaceAsksForNothing) {
  Planned planned = plan_of(0);
  EXPECT_EQ(borrow(planned, 0).data(), nullptr);
  EXPECT_TRUE(lender.asked.empty());
  EXPECT_EQ(lowered, 0);
}

TEST_F(WorkspaceTest, WhatTheCallerLendsIsUsed) {
  lender.most_bytes = 1024;
  Planned planned = plan_of(1024);
  EXPECT_EQ(borrow(planned, 0).data(), lender.memory.data());
  EXPECT_EQ(planned.plan.workspace_bytes, 1024);
  EXPECT_EQ(lowered, 0);
}

TEST_F(WorkspaceTest, WithoutMemoryThePlanThatDoesWithoutItRuns) {
  for (const bool throws : {false, true}) {
    lender.throws = throws;
    Planned planned = plan_of(1024);
    EXPECT_EQ(borrow(planned, 0).data(), nullptr);
    EXPECT_EQ(planned.plan.workspace_bytes, 0);
  }
}

TEST_F(WorkspaceTest, WithLittleMemoryThePlanThatDoesWithLessRuns) {
  lender.most_bytes = 512;
  Planned planned = plan_of(1024);
  EXPECT_NE(borrow(planned, 512).data(), nullptr);
  EXPECT_EQ(planned.plan.workspace_bytes, 512);
  EXPECT_EQ(lender.asked, (std::vector<std::int64_t>{1024, 512}));
}

TEST_F(WorkspaceTest, MemoryThatIsNeededIsMissedInTheWordsOfItsOwner) {
  Planned planned = plan_of(1024);
  expect_refusal(ErrorKind::kRuntime, {"no memory", "workspace 1024 bytes"},
                 [&] { borrow(planned, 1024); });
  lender.throws = true;
  EXPECT_THROW(borrow(planned, 1024), std::runtime_error);
  EXPECT_EQ(planned.plan.workspace_bytes, 1024);
}

TEST_F(WorkspaceTest, TheHeapServesTheCpuAndNobodyServesAGpu) {
  context.memory = nullptr;
  Planned planned = plan_of(1024);
  EXPECT_NE(borrow(planned, 1024).data(), nullptr);
  problem.device = {DeviceType::kCuda, 0};
  expect_refusal(ErrorKind::kInvalidValue, {"context.memory is null", "needs 1024 bytes"},
                 [&] { borrow(planned, 1024); });
}

}  // namespace
}  // namespace moegemm
