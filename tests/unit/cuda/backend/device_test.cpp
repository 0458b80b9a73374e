#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "core/process/named_gpus.h"
#include "core/registry.h"
#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "moegemm/error.h"
#include "moegemm/plan.h"

namespace moegemm::cuda {
namespace {

TEST(CudaError, NamesWhatWasTriedAndTheCudaError) {
  try {
    check(cudaErrorInvalidValue, "do the impossible");
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRuntime);
    EXPECT_STREQ(error.what(),
                 "could not do the impossible: cudaErrorInvalidValue: invalid argument");
  }
}

TEST(CudaError, SuccessIsSilent) { EXPECT_NO_THROW(check(cudaSuccess, "succeed")); }

TEST(DeviceFacts, EitherThereAreDevicesOrAReasonWhyNot) {
  if (device_count() == 0) {
    EXPECT_EQ(why_no_device().rfind("no CUDA device: ", 0), 0u) << why_no_device();
    EXPECT_GT(why_no_device().size(), std::string("no CUDA device: ").size());
  } else {
    EXPECT_EQ(why_no_device(), "");
    EXPECT_GT(device_facts(0)->multiprocessors, 0);
    EXPECT_GE(device_facts(0)->shared_memory_bytes, 48 * 1024);
  }
}

TEST(DeviceFacts, AnOrdinalThatIsNotThereGivesNull) {
  EXPECT_EQ(device_facts(-1), nullptr);
  EXPECT_EQ(device_facts(device_count()), nullptr);
}

TEST(DeviceFacts, GuardRefusesADeviceThatIsNotThere) {
  try {
    const DeviceGuard guard(device_count());
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind("no CUDA device", 0), 0u) << error.what();
  }
}

TEST(DeviceFacts, NamedGpuHasFactsAndRunsNothing) {
  const Device device = planning_gpu("a100").value();
  ASSERT_NE(device_facts(device.index), nullptr);
  EXPECT_EQ(device_facts(device.index)->multiprocessors, 108);
  EXPECT_EQ(device_facts(kFirstNamedGpu + static_cast<int>(named_gpus().size())), nullptr);
  EXPECT_EQ(planning_gpu("banana"), std::nullopt);
  try {
    const DeviceGuard guard(device.index);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "no CUDA device is called a100: problems are planned for it, nothing runs there");
  }
}

/// What is written down of a GPU is what the runtime reports of it.
TEST(DeviceFacts, NamedGpuIsLikeTheRealOne) {
  bool compared = false;
  for (int i = 0; i < static_cast<int>(named_gpus().size()); ++i) {
    const DeviceFacts& named = *device_facts(kFirstNamedGpu + i);
    for (int ordinal = 0; ordinal < device_count(); ++ordinal) {
      const DeviceFacts& real = *device_facts(ordinal);
      if (real.name != named.name) continue;
      compared = true;
      EXPECT_EQ(named.major, real.major);
      EXPECT_EQ(named.minor, real.minor);
      EXPECT_EQ(named.multiprocessors, real.multiprocessors);
      EXPECT_EQ(named.shared_memory_bytes, real.shared_memory_bytes);
      EXPECT_EQ(named.multiprocessor_shared_memory_bytes, real.multiprocessor_shared_memory_bytes);
      EXPECT_EQ(named.l2_bytes, real.l2_bytes);
      EXPECT_NEAR(named.clock_hz, real.clock_hz, 1e-2 * real.clock_hz);
      EXPECT_NEAR(named.bytes_per_second, real.bytes_per_second, 1e-2 * real.bytes_per_second);
    }
  }
  if (!compared) GTEST_SKIP() << "no GPU of this machine is a named one";
}

TEST(DeviceFacts, QueryListsEveryDeviceOrSaysWhyNone) {
  std::string why = "stale";
  const auto gpus = query_gpus(&why);
  EXPECT_EQ(static_cast<int>(gpus.size()), device_count());
  EXPECT_EQ(why, why_no_device());
  for (const GpuInfo& gpu : gpus) {
    EXPECT_NE(gpu.backend, "");
  }
}

}  // namespace
}  // namespace moegemm::cuda
