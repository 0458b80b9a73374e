#include "moegemm/quantization.h"

#include <gtest/gtest.h>

#include "moegemm/problem.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

TEST(Quantization, TextsNameBlocksAndScales) {
  const auto parsed = [](const char* text, ScaleType type = ScaleType::kFloat32) {
    return parse_quantization(text, type, 300, 640);
  };
  EXPECT_EQ(parsed("mxfp4", ScaleType::kE8m0),
            (Quantization{WeightFormat::kMxfp4, ScaleType::kE8m0, 1, 32}));
  EXPECT_EQ(parsed("fp8/128x128"),
            (Quantization{WeightFormat::kFp8, ScaleType::kFloat32, 128, 128}));
  EXPECT_EQ(parsed("fp8/channel"), (Quantization{WeightFormat::kFp8, ScaleType::kFloat32, 1, 640}));
  EXPECT_EQ(parsed("fp8/tensor"),
            (Quantization{WeightFormat::kFp8, ScaleType::kFloat32, 300, 640}));
  EXPECT_EQ(parsed("int4/64", ScaleType::kBFloat16).block_k, 64);
  EXPECT_EQ(to_string(parsed("nf4/64")), "nf4/64");
  EXPECT_EQ(to_string(parsed("fp8/128x128")), "fp8/128x128(fp32)");
  EXPECT_EQ(to_string(Quantization{}), "plain");
  for (const char* wrong : {"", "fp8", "fp8/", "fp8/128", "int4", "nf4/x", "mxfp4/32", "int3/32"}) {
    expect_refusal(ErrorKind::kInvalidValue, {"w_format is '", "accepted are mxfp4"},
                   [&] { parsed(wrong); });
  }
}

TEST(Quantization, CountsValuesAndScales) {
  const Quantization fp8{WeightFormat::kFp8, ScaleType::kFloat32, 128, 128};
  EXPECT_EQ(fp8.expert_bytes(200, 300), 60000);
  EXPECT_EQ(fp8.scale_rows(200), 2);
  EXPECT_EQ(fp8.scale_columns(200, 300), 3);
  EXPECT_EQ(fp8.scale_of(199, 299, 200, 300), 5);
  EXPECT_EQ(fp8.stored_bytes(200, 300), 60000 + 6 * 4);
  // Blocks of nf4 go on from row to row, and an odd number of nibbles takes a whole byte.
  const Quantization nf4{WeightFormat::kNf4, ScaleType::kFloat32, 1, 64};
  EXPECT_EQ(nf4.expert_bytes(3, 33), 50);
  EXPECT_EQ(nf4.expert_scales(3, 33), 2);
  EXPECT_EQ(nf4.scale_of(1, 30, 3, 33), 0);
  EXPECT_EQ(nf4.scale_of(1, 31, 3, 33), 1);
}

TEST(Quantization, IsPartOfAProblem) {
  Problem plain;
  plain.n = plain.k = 128;
  Problem quantised = plain;
  quantised.quantization = {WeightFormat::kInt4, ScaleType::kBFloat16, 1, 32};
  Problem others[] = {quantised, quantised, quantised, quantised};
  others[0].quantization.format = WeightFormat::kNf4;
  others[1].quantization.block_k = 64;
  others[2].packed_alignment = 8;
  others[3].scales_alignment = 4;
  EXPECT_NE(hash_value(plain), hash_value(quantised));
  EXPECT_NE(to_string(quantised).find(" W=int4/32(bf16)"), std::string::npos)
      << to_string(quantised);
  for (const Problem& other : others) {
    EXPECT_NE(other, quantised);
    EXPECT_NE(hash_value(other), hash_value(quantised)) << to_string(other);
    EXPECT_NE(to_string(other), to_string(quantised));
  }
  Problem any_order = plain;
  any_order.batch_invariant = false;
  EXPECT_NE(hash_value(any_order), hash_value(plain));
}

}  // namespace
}  // namespace moegemm
