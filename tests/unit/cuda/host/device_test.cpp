#include <gtest/gtest.h>

#include "core/registry.h"
#include "cuda/host/device_facts.h"
#include "cuda/host/error.h"
#include "moegemm/error.h"

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
