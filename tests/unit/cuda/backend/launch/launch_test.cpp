#include "cuda/backend/launch/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/launch/loading.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

using testing::HasSubstr;

void not_a_kernel() {}

/// Fails with and without a GPU: the function is not one that a module registered.
const LaunchSpec kFailing = {reinterpret_cast<const void*>(&not_a_kernel), "not_a_kernel",
                             dim3(2, 3), dim3(128), 4096};

TEST(Launch, FailureNamesKernelPlanAndCudaError) {
  Step step;
  step.kernel_name = "a_planned_kernel";
  try {
    launch(kFailing, nullptr, nullptr, step);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRuntime);
    EXPECT_THAT(error.what(), HasSubstr("not_a_kernel"));
    EXPECT_THAT(error.what(), HasSubstr(to_string(step)));
    EXPECT_THAT(error.what(), HasSubstr("grid 2x3x1, block 128x1x1"));
    EXPECT_THAT(error.what(), HasSubstr("cudaError"));
  }
}

TEST(DriverEntry, IsNullForANameThatNoDriverHas) {
  EXPECT_EQ(driver_entry("cuNoSuchFunction"), nullptr);
  if (device_count() > 0) {
    EXPECT_NE(driver_entry("cuLaunchKernel"), nullptr);
  }
}

TEST(Launch, FailureLeavesNoErrorBehind) {
  const cudaError_t before = cudaPeekAtLastError();  // not success where there is no driver
  EXPECT_THROW(launch(kFailing, nullptr, nullptr), Error);
  EXPECT_EQ(cudaPeekAtLastError(), before);
}

}  // namespace
}  // namespace moegemm::cuda
