#include "moegemm/info.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "moegemm/execution.h"

namespace moegemm {
namespace {

TEST(Info, VersionAndBuildAreFilledIn) {
  EXPECT_EQ(version(), MOEGEMM_PROJECT_VERSION);
  EXPECT_NE(build_description().find("CUDA"), std::string::npos);
}

TEST(Info, CpuHasThreadsAndAnInstructionSet) {
  const CpuInfo cpu = cpu_info();
  EXPECT_GE(cpu.threads, 1);
  EXPECT_FALSE(cpu.isa.empty());
  EXPECT_FALSE(cpu.isas.empty());
}

TEST(Info, NoGpuComesWithAReason) {
  std::string why;
  if (gpus(&why).empty()) {
    EXPECT_FALSE(why.empty());
  }
}

TEST(Info, EveryBackendIsAvailableOrSaysWhyNot) {
  std::set<BackendKind> kinds;
  for (const BackendInfo& backend : backends()) {
    kinds.insert(backend.kind);
    EXPECT_EQ(backend.available, backend.reason.empty()) << to_string(backend.kind);
    if (backend.kind == BackendKind::kReference || backend.kind == BackendKind::kCpu) {
      EXPECT_TRUE(backend.available) << backend.reason;
    }
  }
  EXPECT_EQ(kinds.size(), 4u);
}

TEST(LoadKernels, LoadsNothingWhereThereIsNoContext) {
  EXPECT_EQ(load_kernels(Device{}), 0);
  EXPECT_EQ(load_kernels({DeviceType::kCuda, 12345}), 0);  // no such GPU
}

TEST(Info, KernelNamesAreUniqueWithinABackend) {
  std::set<std::pair<BackendKind, std::string>> names;
  for (const KernelInfo& kernel : kernels()) {
    EXPECT_TRUE(names.emplace(kernel.backend, kernel.name).second) << kernel.name;
  }
  EXPECT_GE(names.size(), 3u);
}

}  // namespace
}  // namespace moegemm
