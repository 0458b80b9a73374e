#include "moegemm/info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"

namespace moegemm::test {
namespace {

using ::testing::HasSubstr;

TEST(ProgramInfo, ShowsVersionCpuAndEveryBackend) {
  const ProgramResult result = run_program("info");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("moegemm " + version()));
  EXPECT_THAT(result.out, HasSubstr(cpu_info().isa));
  for (const BackendInfo& backend : backends()) {
    EXPECT_THAT(result.out, HasSubstr(to_string(backend.kind)));
    if (!backend.available) {
      EXPECT_THAT(result.out, HasSubstr(backend.reason));
    }
  }
}

TEST(ProgramInfo, ShowsEachGpuOrWhyThereIsNone) {
  const ProgramResult result = run_program("info");
  std::string why_none;
  const auto found = gpus(&why_none);
  if (found.empty()) {
    EXPECT_THAT(result.out, HasSubstr("none: " + why_none));
  }
  for (const GpuInfo& gpu : found) EXPECT_THAT(result.out, HasSubstr(gpu.name));
}

TEST(ProgramInfo, KernelsListsEveryCompiledKernel) {
  const ProgramResult result = run_program("info --kernels");
  EXPECT_EQ(result.exit_code, 0);
  for (const KernelInfo& kernel : kernels()) EXPECT_THAT(result.out, HasSubstr(kernel.name));
}

TEST(ProgramInfo, JsonSaysTheSame) {
  const ProgramResult result = run_program("info --kernels --json");
  ASSERT_EQ(result.exit_code, 0);
  const auto info = result.json();
  EXPECT_EQ(info.at("version"), version());
  EXPECT_EQ(info.at("cpu").at("isa"), cpu_info().isa);
  EXPECT_EQ(info.at("backends").size(), backends().size());
  EXPECT_EQ(info.at("kernels").size(), kernels().size());
  EXPECT_EQ(info.at("gpus").size(), gpus().size());
}

TEST(ProgramInfo, JsonWithoutKernelsLeavesThemOut) {
  EXPECT_FALSE(run_program("info --json").json().contains("kernels"));
}

}  // namespace
}  // namespace moegemm::test
