#include "cuda/sm90/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "cuda/sm90/row_gemm/traits.h"

namespace moegemm::cuda::sm90 {
namespace {

DeviceFacts hopper() {
  DeviceFacts facts;
  facts.major = 9;
  facts.multiprocessors = 132;
  facts.shared_memory_bytes = 227 << 10;
  return facts;
}

Problem first_product(Permutation permutation, std::int64_t experts = 128) {
  Problem problem;
  problem.experts = experts;
  problem.rows = 4096;
  problem.n = 1536;
  problem.k = 2048;
  problem.permutation = permutation;
  return problem;
}

Problem activated(Permutation permutation, GateLayout layout, std::int64_t experts = 128) {
  Problem problem = first_product(permutation, experts);
  problem.activation = Activation{.layout = layout};
  return problem;
}

/// The tiles, {features, rows}, that take a problem, with an activation of their own or without.
std::set<std::pair<int, int>> takers(const Problem& problem) {
  std::set<std::pair<int, int>> tiles;
  for (const KernelEntry& entry : kernels()) {
    if (entry.info.op != problem.op) continue;
    if (refuse(entry, problem, hopper()).empty()) {
      tiles.emplace(entry.info.tile.columns, entry.info.tile.rows);
    }
  }
  return tiles;
}

std::string refusal(const std::string& kernel, const Problem& problem) {
  for (const KernelEntry& entry : kernels()) {
    if (entry.info.name == kernel) return refuse(entry, problem, hopper());
  }
  return "there is no such kernel";
}

using Tiles = std::set<std::pair<int, int>>;

TEST(Sm90Kernels, ActivatedKernelsTakeEveryLayoutOfGatheredAndOrderedRows) {
  for (const GateLayout layout :
       {GateLayout::kNone, GateLayout::kConcatenated, GateLayout::kInterleaved}) {
    for (const bool bias : {false, true}) {
      Problem gathered = activated(Permutation::kX, layout);
      gathered.bias = bias;
      EXPECT_EQ(takers(gathered), (Tiles{{256, 160}, {128, 192}, {128, 64}, {128, 32}, {64, 16}}));
      Problem in_order = activated(Permutation::kNone, layout);
      in_order.bias = bias;
      EXPECT_EQ(takers(in_order), (Tiles{{128, 192}, {128, 64}, {128, 32}, {64, 16}}));
    }
  }
}

TEST(Sm90Kernels, ManyExpertsLeaveTheWideActivatedTileOut) {
  const auto with = [](std::int64_t experts) {
    return takers(activated(Permutation::kX, GateLayout::kConcatenated, experts));
  };
  EXPECT_EQ(with(256).count({256, 160}), 1u);  // DeepSeek-V3
  EXPECT_EQ(with(512), (Tiles{{128, 192}, {128, 64}, {128, 32}, {64, 16}}));
  EXPECT_EQ(with(1024), (Tiles{{128, 192}, {128, 64}, {128, 32}, {64, 16}}));
}

TEST(Sm90Kernels, ActivatedKernelsRefuseWhatTheyDoNotStore) {
  const std::string kernel = "sm90_forward_activated_128x64_s8_pingpong";
  EXPECT_EQ(refusal(kernel, first_product(Permutation::kX)), "stores activated rows only");
  Problem fp32 = activated(Permutation::kX, GateLayout::kConcatenated);
  fp32.out_dtype = DType::kFloat32;
  EXPECT_EQ(refusal(kernel, fp32), "stores activated rows in the dtype of the inputs only");
  EXPECT_EQ(refusal("sm90_forward_128x64_s8_pingpong",
                    activated(Permutation::kX, GateLayout::kConcatenated)),
            "leaves the activation to a pass after it");
  Problem transposed = activated(Permutation::kY, GateLayout::kInterleaved);
  transposed.op = Op::kDx;
  EXPECT_EQ(takers(transposed), Tiles{});
}

TEST(Sm90Kernels, ARefusalNamesWhatIsWrongBeforeWhatElseThereIs) {
  Problem narrow = first_product(Permutation::kX);
  narrow.k = 20;
  for (const KernelEntry& entry : row_gemm_kernels()) {
    if (entry.info.op != Op::kForward || entry.info.weights != WeightFormat::kPlain ||
        entry.info.name.find("256x128") != std::string::npos ||
        entry.info.name.find("tf32") != std::string::npos) {
      continue;  // that one gathers nothing, and these take no bf16
    }
    EXPECT_EQ(entry.refuse(entry, narrow, hopper()),
              "K = 20 is not a multiple of 8, which gathered rows need");
  }
}

TEST(Sm90Kernels, BiasesAreAddedInOrderByEveryTile) {
  Problem problem = first_product(Permutation::kY);
  problem.bias = true;
  EXPECT_EQ(takers(problem),
            (Tiles{{256, 128}, {128, 192}, {192, 128}, {128, 64}, {128, 32}, {64, 16}}));
  problem.multiply = true;
  EXPECT_EQ(takers(problem),
            (Tiles{{256, 128}, {128, 192}, {192, 128}, {128, 64}, {128, 32}, {64, 16}}));
  problem.multiply = false;
  problem.op = Op::kDx;
  problem.permutation = Permutation::kX;
  EXPECT_EQ(takers(problem), (Tiles{{256, 192}, {128, 192}, {192, 128}, {128, 64}}));
}

TEST(Sm90Kernels, BiasesOfGatheredRowsAreAddedByCooperativeAndSmallTiles) {
  Problem problem = first_product(Permutation::kX);
  problem.bias = true;
  EXPECT_EQ(takers(problem), (Tiles{{256, 160}, {128, 64}, {128, 32}, {64, 16}}));
  EXPECT_EQ(refusal("sm90_forward_128x192_s5_pingpong", problem), "adds no bias to gathered rows");
  problem.op = Op::kDx;
  problem.permutation = Permutation::kY;
  EXPECT_EQ(takers(problem), (Tiles{{256, 192}, {128, 64}}));
}

TEST(Sm90Kernels, ThinTilesAreForThinProductsAlone) {
  for (const auto& [op, permutation] :
       {std::pair(Op::kForward, Permutation::kX), std::pair(Op::kDx, Permutation::kNone)}) {
    Problem problem = first_product(permutation);
    problem.op = op;
    std::int64_t& columns = op == Op::kForward ? problem.n : problem.k;
    for (const std::int64_t taken : {8, 64, 256}) {
      columns = taken;
      EXPECT_EQ(takers(problem).count({64, 128}), 1u) << taken;
    }
    columns = 264;
    EXPECT_EQ(takers(problem).count({64, 128}), 0u);
  }
  Problem wide = first_product(Permutation::kX);
  EXPECT_EQ(takers(wide).count({64, 16}), 1u) << "of few rows";
  EXPECT_EQ(refusal("sm90_forward_64x128_s8_pingpong", wide),
            "is for up to 256 columns, these are 1536");
}

TEST(Sm90Kernels, ThinTilesOfDwAreForOneThinSide) {
  const std::string thin = "sm90_dw_256x64x32_s9";
  Problem problem = first_product(Permutation::kX);
  problem.op = Op::kDw;
  EXPECT_EQ(refusal(thin, problem), "is for one side of up to 256 columns, here it has 1536");
  problem.n = 64;
  EXPECT_EQ(refusal(thin, problem), "");
  std::swap(problem.n, problem.k);
  EXPECT_NE(refusal(thin, problem), "") << "the gathered side is the wide one";
  problem.permutation = Permutation::kNone;
  EXPECT_EQ(refusal(thin, problem), "");
}

TEST(Sm90Kernels, CachePolicyOfWeightsIsPlanned) {
  DeviceFacts facts = hopper();
  facts.l2_bytes = 50 << 20;
  const Problem problem = first_product(Permutation::kX);
  for (const KernelEntry& entry : row_gemm_kernels()) {
    const bool tall = entry.info.tile.rows == 192;
    if (entry.info.op != Op::kForward || (!tall && entry.info.tile.rows > 64)) continue;
    EXPECT_EQ(entry.grid(entry, problem, facts).weights,
              tall ? WeightCaching::kPassThrough : WeightCaching::kKeep)
        << entry.info.name;
  }
}

TEST(Sm90Kernels, OrderOfTheTilesOfDwIsPlanned) {
  DeviceFacts facts = hopper();
  facts.l2_bytes = 50 << 20;
  Problem problem = first_product(Permutation::kX);
  problem.op = Op::kDw;
  const KernelEntry entry = weight_gemm_kernels().front();
  EXPECT_EQ(entry.grid(entry, problem, facts).order, TileOrder::kAlongColumns);
  problem.rows = problem.experts * 8192;  // 32 MiB of an expert's X are more than L2 keeps
  EXPECT_EQ(entry.grid(entry, problem, facts).order, TileOrder::kAlongRows);
  std::swap(problem.n, problem.k);
  EXPECT_EQ(entry.grid(entry, problem, facts).order, TileOrder::kAlongColumns);
}

std::string weight_refusal(const Problem& problem) {
  const KernelEntry entry = weight_gemm_kernels().front();
  return refuse(entry, problem, hopper());
}

TEST(Sm90Kernels, TilesOfManyRowsScatterTheOutputOf512Experts) {  // Qwen3-Next
  Problem problem = first_product(Permutation::kY, 512);
  EXPECT_EQ(takers(problem).count({128, 192}), 1u);
}

TEST(Sm90Kernels, MoreExpertsThanSharedMemoryHoldsAreRefused) {
  for (const std::int64_t experts : {2500ll, 1ll << 20, 1ll << 29}) {
    for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
      EXPECT_EQ(takers(first_product(permutation, experts)), Tiles{}) << experts;
    }
    Problem problem = first_product(Permutation::kX, experts);
    problem.op = Op::kDw;
    EXPECT_NE(weight_refusal(problem), "") << experts;
  }
  EXPECT_NE(refusal("sm90_forward_128x32_s10_pingpong", first_product(Permutation::kX, 1ll << 20))
                .find("1048576 experts need 8"),
            std::string::npos);
}

TEST(Sm90Kernels, AGatheredOperandOfDwBeyond64GiBIsRefusedByThePlan) {
  Problem problem = first_product(Permutation::kX);
  problem.op = Op::kDw;
  EXPECT_EQ(weight_refusal(problem), "");
  problem.far_rows = true;
  EXPECT_EQ(weight_refusal(problem),
            "gathers from at most 64 GiB, the permuted operand spans more");
  problem.presorted = true;  // copied into order: nothing is gathered
  EXPECT_EQ(weight_refusal(problem), "");
}

Problem quantised(const Quantization& quantization, Op op = Op::kForward) {
  Problem problem = first_product(Permutation::kNone);
  problem.op = op;
  problem.quantization = quantization;
  return problem;
}

constexpr Quantization kMxfp4 = {WeightFormat::kMxfp4, ScaleType::kE8m0, 1, 32};
constexpr Quantization kInt4 = {WeightFormat::kInt4, ScaleType::kBFloat16, 1, 128};
constexpr Quantization kNf4 = {WeightFormat::kNf4, ScaleType::kFloat32, 1, 64};
constexpr Quantization kFp8 = {WeightFormat::kFp8, ScaleType::kFloat32, 128, 128};

TEST(Sm90Kernels, EveryFormatIsDecodedInForwardAndDx) {
  for (const Quantization& format : {kMxfp4, kInt4, kNf4, kFp8}) {
    for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
      Problem problem = quantised(format);
      problem.permutation = permutation;
      problem.bias = true;
      problem.low_rank = 16;
      Tiles tiles = takers(problem);
      EXPECT_GE(std::erase_if(tiles, [](const auto& tile) { return tile.first == 16; }), 1u)
          << "few rows stream the weights";
      EXPECT_EQ(tiles, (Tiles{{128, 256}, {128, 128}, {128, 32}}));
      problem.op = Op::kDx;
      EXPECT_EQ(takers(problem).count({128, 256}), 1u);
    }
  }
}

TEST(Sm90Kernels, BlocksOfOneScaleMayBeRowsOrExperts) {
  for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{1536}}) {
    const Problem problem =
        quantised({WeightFormat::kFp8, ScaleType::kBFloat16, rows, 2048}, Op::kDx);
    EXPECT_EQ(takers(problem), (Tiles{{128, 256}}));
  }
}

TEST(Sm90Kernels, WhatTheDecodersDoNotTakeIsRefused) {
  const auto no_takers = [](Problem problem) { return takers(problem).empty(); };
  Problem problem = quantised(kMxfp4);
  problem.dtype = problem.out_dtype = DType::kFloat16;
  EXPECT_TRUE(no_takers(problem));
  problem = quantised(kMxfp4);
  problem.k = 96;
  EXPECT_TRUE(no_takers(problem));
  problem = quantised(kMxfp4);
  problem.packed_alignment = 8;
  EXPECT_TRUE(no_takers(problem));
  Quantization fp16_scales = kInt4;
  fp16_scales.scale_type = ScaleType::kFloat16;
  EXPECT_TRUE(no_takers(quantised(fp16_scales)));
  Quantization across_rows = kNf4;
  across_rows.block_k = 4096;
  EXPECT_TRUE(no_takers(quantised(across_rows)));
}

Problem tf32_product(Op op, Permutation permutation) {
  Problem problem = first_product(permutation);
  problem.op = op;
  problem.dtype = problem.out_dtype = DType::kFloat32;
  problem.allow_tf32 = true;
  return problem;
}

TEST(Sm90Kernels, Tf32RunsHereWhateverTheRows) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
      Problem problem = tf32_product(op, permutation);
      const Tiles tiles = takers(problem);
      EXPECT_FALSE(tiles.empty());
      problem.rows = 1;
      EXPECT_EQ(takers(problem), tiles);
      problem.experts = 1024;
      EXPECT_EQ(takers(problem), tiles);
    }
  }
}

TEST(Sm90Kernels, Fp32WithoutTf32IsForAnotherBackend) {
  for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
    Problem problem = tf32_product(op, Permutation::kNone);
    problem.allow_tf32 = false;
    EXPECT_EQ(takers(problem), Tiles{});
  }
  const std::string kernel = "sm90_forward_tf32_128x64_s8_pingpong";
  EXPECT_EQ(refusal(kernel, first_product(Permutation::kX)), "inputs are bf16, must be fp32");
  Problem full = tf32_product(Op::kForward, Permutation::kX);
  full.allow_tf32 = false;
  EXPECT_EQ(refusal(kernel, full), "inputs are fp32, and TF32 is not allowed");
}

TEST(Sm90Kernels, Tf32OfNarrowRowsIsForAnotherBackend) {
  Problem problem = tf32_product(Op::kDw, Permutation::kNone);
  problem.n = 1538;
  EXPECT_EQ(takers(problem), Tiles{});
  problem = tf32_product(Op::kForward, Permutation::kX);
  problem.k = 2050;
  EXPECT_EQ(takers(problem), Tiles{});
  problem = tf32_product(Op::kForward, Permutation::kNone);
  problem.input_alignment = 8;
  EXPECT_EQ(takers(problem), Tiles{});
}

TEST(Sm90Kernels, BlocksThatLookForUnnamedRowsTakeTheMemoryThatIsLeft) {
  int scattering = 0;
  for (const Op op : {Op::kForward, Op::kDx}) {
    for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
      for (const std::int64_t experts : {1, 8, 128, 512, 1500}) {
        Problem problem = first_product(permutation, experts);
        problem.op = op;
        for (const KernelEntry& entry : kernels()) {
          if (entry.info.op != op || entry.info.weights != WeightFormat::kPlain) continue;
          if (!refuse(entry, problem, hopper()).empty()) continue;
          const std::int64_t needed = entry.smem_bytes(problem);
          const std::int64_t left = (hopper().shared_memory_bytes - needed) / 4;
          const std::int64_t words =
              problem.scatters() ? std::min<std::int64_t>(left, kMostNamedWords - kLeastNamedWords)
                                 : 0;
          EXPECT_EQ(entry.grid(entry, problem, hopper()).smem_bytes, needed + 4 * words)
              << entry.info.name << " " << to_string(problem);
          scattering += words > 0 ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(scattering, 20);
}

}  // namespace
}  // namespace moegemm::cuda::sm90
