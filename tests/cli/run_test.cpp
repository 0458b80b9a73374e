#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cli/program.h"
#include "moegemm/info.h"

namespace moegemm::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::string kSmallLayer =
    "run --experts 5 --topk 2 --hidden 48 --intermediate 24 --tokens 33 --repeat 1 ";

TEST(ProgramRun, TableHasEveryOperationAndPasses) {
  const ProgramResult result = run_program(kSmallLayer);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.err, IsEmpty());  // no progress bar where there is no terminal
  for (const char* text : {"route", "forward 1", "forward 2", "combine", "dX 1", "dX 2", "dW 1",
                           "dW 2", "GFLOP/s", "all checks passed"}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
  EXPECT_THAT(result.out, Not(HasSubstr("WRONG")));
}

TEST(ProgramRun, QuantisedWeightsOfEveryFormatPass) {
  for (const char* format : {"mxfp4", "fp8", "int4", "nf4"}) {
    const ProgramResult result =
        run_program(kSmallLayer + "--hidden 64 --intermediate 32 --json --weights " + format);
    ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
    const auto document = result.json();
    EXPECT_TRUE(document.at("passed")) << format;
    EXPECT_EQ(document.at("layer").at("weights"), format);
    EXPECT_EQ(document.at("ops").size(), 8) << "a frozen W has no dW";
  }
  const ProgramResult result = run_program(kSmallLayer + "--weights mxfp4");
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("w has K = 48"));
}

struct Variant {
  const char* name;
  const char* flags;  ///< over those of the small layer
};

class ProgramRunVariants : public ::testing::TestWithParam<Variant> {};

TEST_P(ProgramRunVariants, PassesItsOwnChecks) {
  const ProgramResult result = run_program(kSmallLayer + "--json " + GetParam().flags);
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const auto document = result.json();
  EXPECT_TRUE(document.at("passed"));
  ASSERT_EQ(document.at("ops").size(), 10);
  for (const auto& op : document.at("ops")) {
    EXPECT_TRUE(op.at("passed")) << op.at("op");
    EXPECT_GT(op.at("checked_elements"), 0) << op.at("op");
    EXPECT_GT(op.at("median_ms"), 0) << op.at("op");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layers, ProgramRunVariants,
    ::testing::Values(
        Variant{"Bf16", "--dtype bf16"}, Variant{"Fp16", "--dtype fp16"},
        Variant{"Fp32", "--dtype fp32"}, Variant{"Zipf", "--routing zipf"},
        Variant{"Balanced", "--routing balanced"}, Variant{"Top1", "--topk 1"},
        Variant{"EveryExpert", "--topk 5"}, Variant{"OneExpert", "--experts 1 --topk 1"},
        Variant{"OneToken", "--tokens 1"}, Variant{"OneColumn", "--hidden 1 --intermediate 1"},
        Variant{"OddWidth", "--hidden 37 --seed 9"}, Variant{"Reference", "--backend reference"}),
    [](const auto& variant) { return std::string(variant.param.name); });

TEST(ProgramRun, NoTokensIsALayerToo) {
  const ProgramResult result = run_program(kSmallLayer + "--tokens 0 --json");
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

TEST(ProgramRun, SameSeedGivesTheSameErrorsAndAnotherSeedOthers) {
  const auto errors = [](const std::string& seed) {
    nlohmann::json list;
    const auto document = run_program(kSmallLayer + "--json --seed " + seed).json();
    for (const auto& op : document.at("ops")) list.push_back(op.at("error"));
    return list;
  };
  EXPECT_EQ(errors("7"), errors("7"));
  EXPECT_NE(errors("7"), errors("8"));
}

TEST(ProgramRun, FlagsOverrideThePreset) {
  const auto layer =
      run_program("run olmoe --hidden 32 --intermediate 16 --tokens 4 --repeat 1 --json")
          .json()
          .at("layer");
  EXPECT_EQ(layer.at("name"), "olmoe");
  EXPECT_EQ(layer.at("experts"), 64);
  EXPECT_EQ(layer.at("topk"), 8);
  EXPECT_EQ(layer.at("hidden"), 32);
  EXPECT_EQ(layer.at("rows"), 32);
}

TEST(ProgramRun, ErrorAboveTheToleranceExitsWith1AndSaysWhere) {
  const ProgramResult result = run_program(kSmallLayer + "--tolerance 0");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("WRONG forward 1"));
  EXPECT_THAT(result.out, HasSubstr("exceeds the tolerance 0"));
  EXPECT_THAT(result.out, HasSubstr("checks failed"));
}

TEST(ProgramRun, FailedCheckIsInTheJsonToo) {
  const ProgramResult result = run_program(kSmallLayer + "--tolerance 0 --json");
  EXPECT_EQ(result.exit_code, 1);
  const auto document = result.json();
  EXPECT_FALSE(document.at("passed"));
  EXPECT_FALSE(document.at("ops").at(1).at("passed"));
  EXPECT_NE(document.at("ops").at(1).at("fault"), "");
}

TEST(ProgramRun, LayerLargerThanMemoryIsRefusedBeforeItIsAllocated) {
  const ProgramResult result = run_program("run --experts 1000000 --hidden 100000");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("GiB"));
  EXPECT_THAT(result.err, HasSubstr("--experts"));
}

TEST(ProgramRun, LayerWithMoreBytesThan64BitsCountIsRefusedAsTooLarge) {
  const std::string layer =
      "--experts 1000000000 --topk 1 --hidden 1000000000 --intermediate 1000000000 --tokens 1";
  for (const std::string command : {"run ", "tune "}) {
    const ProgramResult result = run_program(command + layer);
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(result.err, ::testing::ContainsRegex("needs about [0-9]{10,}[.][0-9] GiB"));
  }
}

TEST(ProgramRun, TerminalShowsWhatRunsAndHowFarItIs) {
  const std::string shown = run_program_on_a_terminal(kSmallLayer + "--repeat 3");
  for (const char* text : {"1/10 route", "random weights", "dX 1: scatter, run 1/3",
                           "10/10 dW 2: gather", "dW 2: gather, check", "all checks passed"}) {
    EXPECT_THAT(shown, HasSubstr(text));
  }
}

TEST(ProgramRun, CudaWithoutAGpuSaysWhyAndWhatWorks) {
  std::string why_none;
  if (!gpus(&why_none).empty()) GTEST_SKIP() << "this machine has a GPU";
  const ProgramResult result = run_program(kSmallLayer + "--device cuda");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr(why_none));
  EXPECT_THAT(result.err, HasSubstr("accepted here: cpu"));
}

TEST(ProgramRunGpu, LayerOnTheGpuPassesItsChecks) {
  std::string why_none;
  if (gpus(&why_none).empty()) GTEST_SKIP() << why_none;
  const ProgramResult result = run_program("run demo --device cuda --repeat 2 --json");
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_TRUE(result.json().at("passed"));
}

}  // namespace
}  // namespace moegemm::test
