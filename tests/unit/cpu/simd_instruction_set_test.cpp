#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cpu/simd/isa/instruction_set.h"
#include "moegemm/moegemm.h"

namespace moegemm::cpu::simd {
namespace {

TEST(InstructionSetSelection, TakesTheBestWhenNothingIsAsked) {
  EXPECT_EQ(select_instruction_set(nullptr), usable_instruction_sets().front());
  EXPECT_EQ(select_instruction_set(""), usable_instruction_sets().front());
}

TEST(InstructionSetSelection, TakesEachUsableOneByName) {
  for (InstructionSet isa : usable_instruction_sets()) {
    EXPECT_EQ(select_instruction_set(to_string(isa)), isa);
  }
}

TEST(InstructionSetSelection, PortableIsAlwaysUsable) {
  EXPECT_EQ(usable_instruction_sets().back(), InstructionSet::kPortable);
}

TEST(InstructionSetSelection, RefusesAnUnknownWordAndNamesTheAcceptedOnes) {
  try {
    select_instruction_set("sse9");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidValue);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("MOEGEMM_CPU_ISA is 'sse9'"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("portable"));
  }
}

TEST(InstructionSetSelection, CpuInfoNamesTheOneInUse) {
  const CpuInfo info = cpu_info();
  EXPECT_FALSE(info.model.empty());
  EXPECT_GE(info.threads, 1);
  EXPECT_THAT(info.isas, ::testing::Contains(info.isa));
}

TEST(InstructionSetSelection, KernelNamesCarryIt) {
  for (InstructionSet isa : usable_instruction_sets()) {
    for (const KernelInfo& kernel : backend_for(isa).kernels()) {
      EXPECT_EQ(kernel.name.rfind(std::string(to_string(isa)) + "_", 0), 0u) << kernel.name;
      EXPECT_EQ(kernel.backend, BackendKind::kCpu);
    }
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
