#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cli/program.h"
#include "moegemm/info.h"

namespace moegemm::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ProgramUsage, HelpListsTheCommandsAndTheExitCodes) {
  const ProgramResult result = run_program("--help");
  EXPECT_EQ(result.exit_code, 0);
  for (const char* word : {"info", "plan", "run", "tune", "cache", "Exit codes"}) {
    EXPECT_THAT(result.out, HasSubstr(word));
  }
}

TEST(ProgramUsage, HelpOfRunNamesEveryPreset) {
  const ProgramResult result = run_program("run --help");
  EXPECT_EQ(result.exit_code, 0);
  for (const char* preset : {"demo", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "kimi-k2"}) {
    EXPECT_THAT(result.out, HasSubstr(preset));
  }
}

TEST(ProgramUsage, VersionIsTheLibrarysVersion) {
  const ProgramResult result = run_program("--version");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "moegemm " + version() + "\n");
}

struct Refusal {
  const char* name;
  const char* arguments;
  const char* named;     ///< the flag or word the message must name
  const char* accepted;  ///< what the message must offer instead
};

class ProgramRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(ProgramRefuses, WithTheAcceptedValuesOnStderrAndExitCode2) {
  const ProgramResult result = run_program(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err, HasSubstr(GetParam().named));
  EXPECT_THAT(result.err, HasSubstr(GetParam().accepted));
}

INSTANTIATE_TEST_SUITE_P(
    BadCommandLines, ProgramRefuses,
    ::testing::Values(
        Refusal{"NoCommand", "", "command", "info, plan, run, tune, cache"},
        Refusal{"UnknownCommand", "paint", "paint", "info, plan, run"},
        Refusal{"UnknownFlag", "run --colour red", "--colour", "--experts"},
        Refusal{"Preset", "run gpt-2", "gpt-2", "mixtral-8x7b"},
        Refusal{"DType", "run --dtype fp8", "--dtype", "bf16,fp16,fp32"},
        Refusal{"Routing", "run --routing random", "--routing", "uniform,zipf,balanced"},
        Refusal{"Device", "run --device tpu", "--device", "cpu, cuda"},
        Refusal{"DeviceIndex", "run --device cuda:x", "--device", "cuda:0"},
        Refusal{"DeviceOfAPlan", "plan --device cuda:16384", "cuda:16384 is not a device",
                "accepted: cpu, cuda"},
        Refusal{"Backend", "run --backend fast", "--backend", "sm90,sm80,cpu,reference"},
        Refusal{"NoExperts", "run --experts 0", "--experts", "from 1 to"},
        Refusal{"ExpertsInWords", "run --experts many", "--experts", "a whole number"},
        Refusal{"FractionOfAnExpert", "run --experts 1.5", "--experts", "a whole number"},
        Refusal{"NegativeTokens", "run --tokens -1", "--tokens", "from 0 to"},
        Refusal{"TopkAboveExperts", "run --experts 4 --topk 5", "--topk", "1 to 4"},
        Refusal{"TooManyRows", "run --tokens 1000000000 --topk 8", "--tokens", "up to"},
        Refusal{"NoRepeat", "run --repeat 0", "--repeat", "from 1 to"},
        Refusal{"NegativeTolerance", "run --tolerance -1", "--tolerance", "from 0 up"},
        Refusal{"MissingValue", "run --seed", "--seed", "--help"},
        Refusal{"NoCacheCommand", "cache", "command", "show, clear, export, import"},
        Refusal{"UnknownCacheCommand", "cache burn", "burn", "show, clear, export, import"},
        Refusal{"ImportOfNothing", "cache import", "file", "--help"},
        Refusal{"Budget", "tune --budget 0", "--budget", "0.01"},
        Refusal{"BudgetNotANumber", "tune --budget nan", "--budget", "from 0.01 to 3600"},
        Refusal{"Link", "plan --expert-parallel 8 --link nan", "--link", "from 0.001 to"},
        Refusal{"PlanGpu", "plan --gpu banana", "--gpu", "h200"},
        Refusal{"PlanGpuTuned", "plan --gpu h200 --autotune", "--gpu", "--autotune"},
        Refusal{"PlanRanksPlot", "plan --expert-parallel 8 --plot a.svg", "--expert-parallel",
                "--plot"},
        Refusal{"PlanRanksGpu", "plan --expert-parallel 8 --gpu h200", "--expert-parallel",
                "--gpu"},
        Refusal{"PlanRanksTuned", "plan --expert-parallel 8 --autotune", "--expert-parallel",
                "--autotune"},
        Refusal{"PlanRanksDevice", "plan --expert-parallel 8 --device cuda", "--expert-parallel",
                "--device"},
        Refusal{"PlanRanksBackend", "plan --expert-parallel 8 --backend cpu", "--expert-parallel",
                "--backend"},
        Refusal{"PlanRanksWeights", "plan --expert-parallel 8 --weights mxfp4", "--expert-parallel",
                "--weights"},
        Refusal{"PlanTopk", "plan --experts 4 --topk 5", "--topk", "1 to 4"}),
    [](const auto& refusal) { return std::string(refusal.param.name); });

TEST(ProgramUsage, VariablesThatMeanNothingAreToldOnStderr) {
  const ProgramResult result = run_program("info", "MOEGEMM_BACKENDS=cpu MOEGEMM_TEST_X=1 ");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("MOEGEMM_BACKENDS means nothing; known are"));
  EXPECT_THAT(result.err, HasSubstr("MOEGEMM_BACKEND,"));
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("MOEGEMM_TEST_X")));
}

TEST(ProgramUsage, BadWordsInVariablesAreRefused) {
  const ProgramResult result = run_program("info", "MOEGEMM_LOAD_EARLY=banana ");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("MOEGEMM_LOAD_EARLY is 'banana'; accepted are 0 and 1"));
}

}  // namespace
}  // namespace moegemm::test
