#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cpu/element_type.h"
#include "cpu/simd/isa/instruction_set.h"
#include "cpu/weight_decoding.h"
#include "moegemm/quantization.h"

/// Quantised weights of few rows: whatever reads them, on each instruction set, the result has the
/// bits of the same product of decoded weights.
namespace moegemm::cpu::simd {
namespace {

struct Format {
  const char* name;
  ScaleType scale_type;
};
constexpr Format kFormats[] = {
    {"mxfp4", ScaleType::kE8m0},          {"int4/32", ScaleType::kBFloat16},
    {"int4/64", ScaleType::kBFloat16},    {"int4/128", ScaleType::kBFloat16},
    {"int4/32", ScaleType::kFloat16},     {"int4/128", ScaleType::kFloat16},
    {"nf4/32", ScaleType::kFloat32},      {"nf4/64", ScaleType::kFloat32},
    {"nf4/256", ScaleType::kFloat32},     {"nf4/4096", ScaleType::kFloat32},
    {"fp8/128x128", ScaleType::kFloat32}, {"fp8/128x128", ScaleType::kE8m0},
    {"fp8/channel", ScaleType::kFloat32}, {"fp8/channel", ScaleType::kBFloat16},
    {"fp8/tensor", ScaleType::kFloat32},  {"fp8/tensor", ScaleType::kFloat16},
};

enum class Scales { kOrdinary, kNegative, kExtreme };

class Weights {
 public:
  Weights(const Format& format, Scales scales, std::int64_t experts, std::int64_t n, std::int64_t k)
      : quantization(parse_quantization(format.name, format.scale_type, n, k)),
        values(experts * quantization.expert_bytes(n, k)),
        scales_(experts * quantization.expert_scales(n, k) * scale_bytes(format.scale_type)) {
    // Every byte, which are all values of each format, in another order in each row.
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<std::uint8_t>(i * 167 + i / 256 * 29);
    }
    const std::int64_t count = experts * quantization.expert_scales(n, k);
    for (std::int64_t i = 0; i < count; ++i) set_scale(i, value_of(scales, i));
    decoded.resize(experts * n * k);
    for (std::int64_t e = 0; e < experts; ++e) {
      const QuantizedExpert expert(quantization, values.data(), scales_.data(), e, n, k);
      for (std::int64_t i = 0; i < n * k; ++i)
        store(expert.at(i / k, i % k), decoded[e * n * k + i]);
    }
  }

  Quantization quantization;
  std::vector<std::uint8_t> values;
  const void* scales() const { return scales_.data(); }
  std::vector<BFloat16> decoded;

 private:
  float value_of(Scales scales, std::int64_t i) const {
    constexpr float kExtremes[] = {0x1p-133f,  0x1.8p-126f, 0x1p-101f, 0x1.fep99f, 0x1p100f,
                                   0x1.8p120f, 0.0f,        -0.0f,     1.0f,       0x1.7p-20f};
    if (scales == Scales::kExtreme) return kExtremes[i % std::size(kExtremes)];
    const float scale = 0.01f + static_cast<float>(i * 37 % 101) * 0.013f;
    return scales == Scales::kNegative && i % 3 == 1 ? -scale : scale;
  }
  void set_scale(std::int64_t i, float value) {
    if (quantization.scale_type == ScaleType::kE8m0) {
      scales_[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(value) >> 23);
    } else if (quantization.scale_type == ScaleType::kFloat32) {
      std::memcpy(&scales_[4 * i], &value, sizeof(value));
    } else {
      write_float(
          scales_.data(),
          quantization.scale_type == ScaleType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16, i,
          value);
    }
  }

  std::vector<std::uint8_t> scales_;
};

/// The output of all rows, expert after expert.
std::vector<BFloat16> product(const Backend& backend, Op op, const Weights& weights, bool packed,
                              const std::vector<std::int32_t>& sizes, std::int64_t n,
                              std::int64_t k) {
  Problem problem;
  problem.op = op;
  problem.experts = static_cast<std::int64_t>(sizes.size());
  problem.n = n;
  problem.k = k;
  for (const std::int32_t size : sizes) problem.rows += size;
  if (packed) problem.quantization = weights.quantization;
  const std::int64_t depth = op == Op::kForward ? k : n, cols = op == Op::kForward ? n : k;
  std::vector<BFloat16> rows(problem.rows * depth), out(problem.rows * cols);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    store(static_cast<float>(i * 73 % 257) / 128.0f - 1.0f, rows[i]);
  }
  Operands operands;
  operands.x = operands.dy = rows.data();
  operands.w = packed ? static_cast<const void*>(weights.values.data()) : weights.decoded.data();
  operands.w_scales = packed ? weights.scales() : nullptr;
  operands.out = out.data();
  operands.x_stride = operands.w_stride = k;
  operands.dy_stride = n;
  operands.out_stride = cols;
  operands.m_sizes = sizes.data();
  backend.launch(backend.plan_with(problem, backend.choose(problem)), problem, operands, {});
  return out;
}

void expect_bits_of_decoded_weights(const Format& format, Scales scales, std::int64_t n,
                                    std::int64_t k) {
  const std::vector<std::int32_t> sizes = {1, 2, 3, 4, 5, 0, 7};
  const Weights weights(format, scales, static_cast<std::int64_t>(sizes.size()), n, k);
  for (const InstructionSet isa : usable_instruction_sets()) {
    const Backend& backend = backend_for(isa);
    for (const Op op : {Op::kForward, Op::kDx}) {
      const auto found = product(backend, op, weights, true, sizes, n, k);
      const auto expected = product(backend, op, weights, false, sizes, n, k);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const float a = to_float(found[i]), b = to_float(expected[i]);
        ASSERT_TRUE(found[i].bits == expected[i].bits || (std::isnan(a) && std::isnan(b)))
            << to_string(isa) << " " << to_string(op) << " " << format.name << " "
            << to_string(weights.quantization) << " [" << n << ", " << k << "] element " << i
            << " is " << a << ", not " << b;
      }
    }
  }
}

TEST(QuantisedFewRows, HaveTheBitsOfDecodedWeights) {
  for (const Format& format : kFormats) {
    for (const Scales scales : {Scales::kOrdinary, Scales::kNegative, Scales::kExtreme}) {
      expect_bits_of_decoded_weights(format, scales, 264, 384);
    }
  }
}

TEST(QuantisedFewRows, HaveThemWhereColumnsDoNotFillSteps) {
  for (const Format& format : kFormats) {
    expect_bits_of_decoded_weights(format, Scales::kOrdinary, 36, 128);
    expect_bits_of_decoded_weights(format, Scales::kOrdinary, 131, 640);
    if (format.name == std::string("int4/128") || format.name == std::string("int4/64")) continue;
    expect_bits_of_decoded_weights(format, Scales::kOrdinary, 20, 96);
  }
}

TEST(QuantisedFewRows, HaveThemWhereTheLowestDepthHasOneStep) {
  for (const Format& format : kFormats) {
    if (format.name == std::string("int4/128")) continue;
    expect_bits_of_decoded_weights(format, Scales::kOrdinary, 300, 64);
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
