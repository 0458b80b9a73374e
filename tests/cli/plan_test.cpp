#include "moegemm/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "cli/program.h"
#include "moegemm/info.h"

namespace moegemm::test {
namespace {

TEST(ProgramPlan, GivesTheSixProductsOfTheLayer) {
  const ProgramResult result = run_program("plan qwen3-30b-a3b --tokens 64 --json");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto document = result.json();
  EXPECT_EQ(document.at("layer").at("experts"), 128);
  const auto& plans = document.at("plans");
  ASSERT_EQ(plans.size(), 6);
  const auto& first = plans[0].at("problem");
  EXPECT_EQ(first.at("op"), "forward");
  EXPECT_EQ(first.at("n"), 2 * 768);
  EXPECT_EQ(first.at("k"), 2048);
  EXPECT_EQ(first.at("rows"), 64 * 8);
  EXPECT_EQ(first.at("permutation"), "permute_x");
  const auto& last = plans[5].at("problem");
  EXPECT_EQ(last.at("op"), "dW");
  EXPECT_EQ(last.at("n"), 2048);
  EXPECT_EQ(last.at("k"), 768);
  EXPECT_EQ(last.at("permutation"), "permute_y");
  for (const auto& entry : plans) EXPECT_NE(entry.at("plan").at("kernel"), "");
}

TEST(ProgramPlan, SaysWhoDecodesQuantisedWeights) {
  const ProgramResult result = run_program("plan qwen3-30b-a3b --tokens 16 --weights mxfp4");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, ::testing::HasSubstr("W      mxfp4: 214 MB of packed values and scales"));
  EXPECT_THAT(result.out, ::testing::HasSubstr("decoded inside the product by"));
  EXPECT_THAT(result.out, ::testing::Not(::testing::HasSubstr("dW")));
  // What crosses memory is packed.
  const auto bytes = [](const std::string& flags) {
    const auto document = run_program("plan qwen3-30b-a3b --tokens 16 --json " + flags).json();
    return document.at("plans")[0].at("cost").at("bytes").template get<double>();
  };
  EXPECT_LT(bytes("--weights mxfp4"), 0.3 * bytes(""));
  EXPECT_LT(bytes("--weights fp8"), 0.55 * bytes(""));
}

TEST(ProgramPlan, GivesEveryLaunchWithItsReason) {
  const auto document = run_program("plan qwen3-30b-a3b --tokens 64 --json").json();
  for (const auto& entry : document.at("plans")) {
    const auto& plan = entry.at("plan");
    EXPECT_GE(plan.at("workspace_bytes"), 0);
    ASSERT_GE(plan.at("steps").size(), 1);
    int products = 0;
    for (const auto& step : plan.at("steps")) {
      EXPECT_NE(step.at("reason"), "");
      if (step.at("kind") != "product") continue;
      ++products;
      EXPECT_EQ(step.at("kernel"), plan.at("kernel"));
      EXPECT_EQ(step.at("grid") == 0, step.at("backend") == "cpu");
      EXPECT_NE(step.at("order"), "");
    }
    EXPECT_EQ(products, 1);
  }
}

TEST(ProgramPlan, NamesTheLimitAndTheFateOfEveryKernel) {
  const auto document = run_program("plan qwen3-30b-a3b --tokens 64 --json").json();
  for (const auto& entry : document.at("plans")) {
    EXPECT_THAT(entry.at("limit"), ::testing::AnyOf("compute", "memory", "tile loads"));
    EXPECT_GT(entry.at("cost").at("total_us"), 0);
    int chosen = 0;
    for (const auto& candidate : entry.at("candidates")) {
      if (candidate.at("chosen")) ++chosen;
      EXPECT_NE(candidate.at("why"), "");
    }
    EXPECT_EQ(chosen, 1);
  }
}

TEST(ProgramPlan, TextSaysWhyAKernelLost) {
  const ProgramResult result = run_program("plan demo");
  EXPECT_EQ(result.exit_code, 0);
  for (const char* text :
       {"step 1 ", "because: ", "limit  ", "FLOP/s", "B/s", "waves", "chosen: ", "lost: "}) {
    EXPECT_THAT(result.out, ::testing::HasSubstr(text));
  }
}

TEST(ProgramPlan, EstimatesExpertsOnManyGpus) {
  const auto document =
      run_program("plan qwen3-30b-a3b --tokens 8192 --expert-parallel 32 --nodes 4 --json").json();
  const auto& plan = document.at("expert_parallel");
  EXPECT_EQ(plan.at("experts_per_rank"), 4);
  EXPECT_EQ(plan.at("rows_per_rank"), 8192 * 8);
  EXPECT_NEAR(plan.at("products_us"), 1031, 1);
  EXPECT_NEAR(plan.at("pass_us"), 64, 1);
  const auto& ways = plan.at("exchange");
  ASSERT_EQ(ways.size(), 3);
  EXPECT_NEAR(ways[0].at("one_way_us"), 4474, 1);
  EXPECT_NEAR(ways[1].at("one_way_us"), 4116, 2);
  EXPECT_NEAR(ways[2].at("one_way_us"), 2029, 2);
  EXPECT_EQ(plan.at("bound"), "exchange");
}

TEST(ProgramPlan, CountsTheBytesOfAnExchangeInsideANode) {
  const auto plan =
      run_program("plan mixtral-8x7b --tokens 8192 --expert-parallel 8 --link 360 --json")
          .json()
          .at("expert_parallel");
  EXPECT_EQ(plan.at("exchange").size(), 2);
  EXPECT_NEAR(plan.at("exchange")[0].at("one_way_us"), 326, 1);
  EXPECT_NEAR(plan.at("exchange")[1].at("copies_per_token"), 2.0, 1e-9);  // one expert on a rank
  EXPECT_NEAR(plan.at("weight_bytes"), 3.0 * 4096 * 14336 * 2, 1);
  EXPECT_EQ(plan.at("bound"), "products");
  const ProgramResult text = run_program("plan deepseek-v3 --expert-parallel 64 --nodes 8");
  for (const char* part :
       {"64 ranks on 8 nodes", "4 on each rank", "once for each node", "bound by"})
    EXPECT_THAT(text.out, ::testing::HasSubstr(part));
}

TEST(ProgramPlan, RefusesRanksThatDivideNothing) {
  const ProgramResult experts = run_program("plan kimi-k2 --expert-parallel 512");
  EXPECT_NE(experts.exit_code, 0);
  EXPECT_THAT(experts.err,
              ::testing::HasSubstr("--expert-parallel is 512; it must divide the 384 experts"));
  const ProgramResult nodes = run_program("plan kimi-k2 --expert-parallel 64 --nodes 7");
  EXPECT_THAT(nodes.err, ::testing::HasSubstr("--nodes is 7; it must divide the 64 ranks"));
  EXPECT_NE(run_program("plan kimi-k2 --nodes 2").exit_code, 0);
}

/// The picture of `moegemm plan ARGUMENTS --plot FILE`.
std::string plot(const std::string& arguments) {
  const std::string path = ::testing::TempDir() + "plan.svg";
  const ProgramResult result = run_program("plan " + arguments + " --plot " + path);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, path + "\n");
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ProgramPlan, PlotHasTheRooflineAndEveryProductWithItsKernel) {
  const std::string svg = plot("qwen3-30b-a3b --tokens 64");
  EXPECT_THAT(svg, ::testing::StartsWith("<svg xmlns="));
  EXPECT_THAT(svg, ::testing::EndsWith("</svg>\n"));
  for (const char* text : {"qwen3-30b-a3b", "64 tokens", "FLOP per byte", "FLOP/s", "B/s",
                           "compute", "memory", "not measured"}) {
    EXPECT_THAT(svg, ::testing::HasSubstr(text));
  }
  const auto plans = run_program("plan qwen3-30b-a3b --tokens 64 --json").json().at("plans");
  for (const auto& entry : plans) {
    EXPECT_THAT(svg, ::testing::HasSubstr(">" + entry.at("op").get<std::string>() + "<"));
    EXPECT_THAT(svg,
                ::testing::HasSubstr(">" + entry.at("plan").at("kernel").get<std::string>() + "<"));
  }
}

TEST(ProgramPlan, PlotOfNothingToPredictSaysSo) {
  for (const char* arguments : {"--backend reference", "--tokens 0"}) {
    const std::string svg = plot(arguments);
    EXPECT_THAT(svg, ::testing::HasSubstr("predicts no times")) << arguments;
    EXPECT_THAT(svg, ::testing::Not(::testing::HasSubstr("nan"))) << arguments;
    EXPECT_THAT(svg, ::testing::Not(::testing::HasSubstr("inf"))) << arguments;
  }
}

TEST(ProgramPlan, PlotThatCannotBeWrittenIsAnError) {
  const ProgramResult result = run_program("plan --plot /no/such/folder/plan.svg");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err,
              ::testing::HasSubstr("--plot /no/such/folder/plan.svg: cannot be written"));
}

TEST(ProgramPlan, PlotOfAnotherFormatIsRefused) {
  const std::string path = ::testing::TempDir() + "plan.png";
  const ProgramResult result = run_program("plan --plot " + path);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(
      result.err,
      ::testing::HasSubstr(path + ": the picture is an SVG; a name that ends in .svg is accepted"));
  EXPECT_FALSE(std::ifstream(path).is_open());
}

TEST(ProgramPlan, NumbersThatBeginWithZeroAreDecimal) {
  const auto layer = [](const char* arguments) {
    return run_program(std::string("plan demo --json ") + arguments).json().at("layer");
  };
  EXPECT_EQ(layer("--tokens 0100").at("tokens"), 100);
  EXPECT_EQ(layer("--tokens 08").at("tokens"), 8);
  const auto spread = run_program("plan kimi-k2 --json --expert-parallel 064 --nodes 08").json();
  EXPECT_EQ(spread.at("expert_parallel"),
            run_program("plan kimi-k2 --json --expert-parallel 64 --nodes 8")
                .json()
                .at("expert_parallel"));
}

TEST(ProgramPlan, ForcedBackendIsTheOnePlanned) {
  const auto document = run_program("plan --backend reference --json").json();
  for (const auto& entry : document.at("plans")) {
    EXPECT_EQ(entry.at("plan").at("backend"), "reference");
  }
}

bool has_cuda_kernels() {
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.backend == BackendKind::kSm80) return true;
  }
  return false;
}

TEST(ProgramPlan, NamedGpuNeedNotBeHere) {
  if (!has_cuda_kernels()) GTEST_SKIP() << "no CUDA kernels are compiled in";
  for (const std::string& name : planning_gpus()) {
    const std::string hopper = name[0] == 'h' ? "sm90" : "sm80";
    const ProgramResult result =
        run_program("plan qwen3-30b-a3b --tokens 8192 --json --gpu " + name);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const auto document = result.json();
    ASSERT_EQ(document.at("plans").size(), 6u);
    for (const auto& entry : document.at("plans")) {
      EXPECT_EQ(entry.at("plan").at("backend"), hopper) << name;
      EXPECT_GT(entry.at("cost").at("total_us"), 0) << name;
      EXPECT_EQ(entry.at("problem").at("device"), "cuda (" + name + ")");
    }
  }
}

TEST(ProgramPlan, NamedGpuWithoutCudaKernelsIsRefused) {
  if (has_cuda_kernels()) GTEST_SKIP() << "CUDA kernels are compiled in";
  const ProgramResult result = run_program("plan --gpu h200");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, ::testing::HasSubstr("--gpu h200: no CUDA kernels are compiled in"));
}

TEST(ProgramPlan, CudaWithoutAGpuOffersTheNamedOnes) {
  std::string why_none;
  if (!gpus(&why_none).empty()) GTEST_SKIP() << "this machine has a GPU";
  const ProgramResult result = run_program("plan --device cuda");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, ::testing::HasSubstr(why_none));
  EXPECT_THAT(result.err, ::testing::HasSubstr("--gpu plans for one that is not here: h200, "));
}

}  // namespace
}  // namespace moegemm::test
