#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "conformance/cases/cases.h"
#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "moegemm/info.h"
#include "moegemm/passes.h"
#include "testing/device/device_problem.h"
#include "testing/numerics/random.h"

/// Quantised weights: every value times every scale is decoded to the bit, and a product has the
/// bits of the product of decoded weights, with the planner's kernel and with each that is named.
namespace moegemm::testing {
namespace {

using Bytes = std::vector<unsigned char>;

/// Empty if all elements are the same, or both NaN; else the first that are not.
std::string difference(DType dtype, const Bytes& found, const Bytes& expected) {
  if (found.size() != expected.size()) return "another number of bytes";
  const std::int64_t element = size_bytes(dtype);
  for (std::int64_t i = 0; i * element < static_cast<std::int64_t>(found.size()); ++i) {
    if (std::memcmp(&found[i * element], &expected[i * element], element) == 0) continue;
    const float a = decode(dtype, found.data(), i), b = decode(dtype, expected.data(), i);
    if (std::isnan(a) && std::isnan(b)) continue;
    return "element " + std::to_string(i) + " is " + std::to_string(a) + ", not " +
           std::to_string(b);
  }
  return "";
}

void expect_exact_decoding(const RowTarget& target, const QuantisedWeights& w, DType dtype,
                           std::int64_t skipped = 0) {
  SCOPED_TRACE(to_string(w.quantization) + " " + to_string(dtype) + " [" +
               std::to_string(w.experts) + ", " + std::to_string(w.n) + ", " + std::to_string(w.k) +
               "]");
  Memory& memory = *target.memory;
  Bytes shifted(skipped, kPoisonByte);
  shifted.insert(shifted.end(), w.values.begin(), w.values.end());
  Buffer values(memory, shifted.size()), scales(memory, w.scales.size());
  values.upload(shifted.data());
  scales.upload(w.scales.data());
  const std::int64_t count = w.experts * w.n * w.k;
  Buffer out(memory, count * size_bytes(dtype), true);
  out.fill(kPoisonByte);
  const auto view = [&](void* data) {
    return TensorView::stack(data, dtype, w.experts, w.n, w.k, 0, memory.device());
  };
  dequantise_weights(view(static_cast<unsigned char*>(values.data()) + skipped),
                     w.scales_view(scales.data(), memory.device()), w.quantization,
                     view(out.data()), memory.context());
  memory.synchronize();
  Bytes expected(count * size_bytes(dtype));
  for (std::int64_t row = 0; row < w.experts * w.n; ++row) {
    const std::vector<float> decoded = w.row(row / w.n, row % w.n);
    for (std::int64_t c = 0; c < w.k; ++c) {
      encode(dtype, expected.data(), row * w.k + c, decoded[c]);
    }
  }
  EXPECT_EQ(difference(dtype, out.download(), expected), "");
  EXPECT_TRUE(out.guards_intact());
  EXPECT_EQ(values.download(), shifted);
  EXPECT_EQ(scales.download(), w.scales);
}

/// Every scale of 16 bits, or every one of e8m0, with every value of four bits.
QuantisedWeights all_nibbles(const Quantization& quantization, std::int64_t scale_count) {
  QuantisedWeights w{quantization, 1, scale_count / 32, 32 * quantization.block_k, {}, {}};
  if (scale_count < 1024) w.n = scale_count, w.k = quantization.block_k;
  w.values.resize(quantization.expert_bytes(w.n, w.k));
  for (std::size_t i = 0; i < w.values.size(); ++i) {
    w.values[i] = static_cast<unsigned char>(2 * i % 16 | (2 * i + 1) % 16 << 4);
  }
  const int bytes = scale_bytes(quantization.scale_type);
  w.scales.resize(scale_count * bytes);
  for (std::int64_t i = 0; i < scale_count; ++i) {
    for (int b = 0; b < bytes; ++b) {
      w.scales[i * bytes + b] = static_cast<unsigned char>(i >> (8 * b));
    }
  }
  return w;
}

/// fp32 scales that rounding could get wrong: none, denormals, powers of two, the largest.
constexpr float kEdgeScales[] = {
    0.0f,     -0.0f,           0x1p-149f, 0x1p-133f, 0x1p-126f, 0x1p-100f, 0x1.000002p-99f,
    0x1p-24f, 0x1.fep-9f,      1.0f,      -1.0f,     0x1.7p3f,  0x1p99f,   0x1p100f,
    0x1p120f, 0x1.fffffep127f, kInf,      -kInf,     kNan};

/// Every byte of fp8 with scales of that kind, one for each row.
QuantisedWeights all_fp8_bytes(ScaleType type, Random& random) {
  const std::int64_t rows = type == ScaleType::kE8m0 ? 256 : 300;
  QuantisedWeights w =
      random_weights({WeightFormat::kFp8, type, 1, 256}, 1, rows, 256, 1, true, random);
  for (std::size_t i = 0; i < w.values.size(); ++i) w.values[i] = static_cast<unsigned char>(i);
  std::int64_t row = 0;
  for (const float scale : kEdgeScales) {
    if (type != ScaleType::kE8m0) w.set_scale(row++, scale);
  }
  for (; type == ScaleType::kE8m0 && row < rows; ++row) w.scales[row] = row & 255;
  return w;
}

void expect_all_values(const RowTarget& target, DType dtype) {
  Random random(run_seed());
  expect_exact_decoding(target, all_nibbles({WeightFormat::kMxfp4, ScaleType::kE8m0, 1, 32}, 256),
                        dtype);
  for (const ScaleType type : {ScaleType::kBFloat16, ScaleType::kFloat16}) {
    const std::int64_t scales = trimmed_run() ? 2048 : 65536;
    expect_exact_decoding(target, all_nibbles({WeightFormat::kInt4, type, 1, 32}, scales), dtype);
  }
  for (const ScaleTypeInfo& type : kScaleTypes) {
    expect_exact_decoding(target, all_fp8_bytes(type.value, random), dtype);
  }
  QuantisedWeights nf4 = random_weights({WeightFormat::kNf4, ScaleType::kFloat32, 1, 64}, 1, 128,
                                        256, 1, true, random);
  std::int64_t block = 0;
  for (const float scale : kEdgeScales) nf4.set_scale(block++, scale);
  expect_exact_decoding(target, nf4, dtype);
}

/// Shapes that vectors do not divide, unaligned memory, several experts.
void expect_all_shapes(const RowTarget& target, DType dtype) {
  Random random(run_seed() + 1);
  struct Shape {
    const char* format;
    ScaleType type;
    std::int64_t experts, n, k;
  };
  const Shape shapes[] = {
      {"mxfp4", ScaleType::kE8m0, 3, 5, 96},
      {"fp8/128x128", ScaleType::kFloat32, 2, 300, 200},
      {"fp8/128x128", ScaleType::kE8m0, 2, 129, 7},
      {"fp8/channel", ScaleType::kBFloat16, 3, 9, 131},
      {"fp8/tensor", ScaleType::kFloat16, 4, 6, 65},
      {"int4/64", ScaleType::kFloat16, 2, 3, 192},
      {"int4/128", ScaleType::kBFloat16, 2, 4, 128},
      {"nf4/64", ScaleType::kFloat32, 3, 7, 33},
      {"nf4/32", ScaleType::kFloat32, 2, 3, 1},
      {"nf4/4096", ScaleType::kFloat32, 2, 70, 130},
  };
  for (const Shape& s : shapes) {
    for (const std::int64_t skipped : {0, 1, 4}) {
      const Quantization q = parse_quantization(s.format, s.type, s.n, s.k);
      expect_exact_decoding(target, random_weights(q, s.experts, s.n, s.k, 1, false, random), dtype,
                            skipped);
    }
  }
}

/// What a call gives; nothing where the backend leaves it to another, or the kernel does not run
/// it.
Bytes run_bits(const Target& target, const HostProblem& host, const std::string& kernel = "") {
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  if (!kernel.empty()) options.config.emplace().kernel = kernel;
  BorrowedMemory lender(*target.memory);
  try {
    device.call(options, lender.context());
  } catch (const Error& error) {
    if (target.may_throw(error, kernel)) return {};
    throw;
  }
  target.memory->synchronize();
  EXPECT_EQ(device.trespass(), "");
  return device.output();
}

void expect_bits_of_decoded_weights(const Target& target, const ProblemCase& problem, Op op,
                                    DType dtype) {
  SCOPED_TRACE(std::string(to_string(op)) + " " + to_string(dtype) + " " + to_string(problem));
  const HostProblem packed =
      build_problem(problem, op, dtype, seed_from(problem.name) + run_seed());
  HostProblem plain = packed;
  plain.spec.weights.clear();
  const Bytes expected = run_bits(target, plain);
  if (expected.empty()) GTEST_SKIP() << target.name() << " leaves this problem to another backend";
  EXPECT_EQ(difference(packed.out_dtype, run_bits(target, packed), expected), "");
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.backend != target.backend || kernel.op != op) continue;
    const Bytes bits = run_bits(target, packed, kernel.name);
    if (bits.empty()) continue;
    EXPECT_EQ(difference(packed.out_dtype, bits, expected), "") << "with kernel " << kernel.name;
  }
}

/// A few cases of each format, with scales as they come and with any at all.
std::vector<ProblemCase> bit_cases() {
  std::vector<ProblemCase> chosen;
  for (const ProblemCase& c : quantised_cases()) {
    const auto ends_with = [&](const char* name) { return c.name.ends_with(name); };
    if (!ends_with("SeveralTiles") && !ends_with("Decoding") && !ends_with("PartialBlocks") &&
        !ends_with("FewRows") && !ends_with("Flat_permute_x") && !ends_with("LowRank_permute_x") &&
        !ends_with("Activated_interleaved") && !ends_with("OddK") && !ends_with("FewRowsFolded")) {
      continue;
    }
    chosen.push_back(c);
    if (!ends_with("SeveralTiles") && !ends_with("Decoding") && !ends_with("FewRows")) continue;
    chosen.back().name += "_ExtremeScales";
    chosen.back().extreme_scales = true;
    chosen.push_back(c);
  }
  return chosen;
}

}  // namespace

void add_quantised_tests() {
  for (const RowTarget& target : row_targets()) {
    for (const NumberFormat& format : kFloatingFormats) {
      const DType dtype = format.value;
      add_test(target.name + "/Dequantise", std::string("EveryValueAndScale_") + format.name,
               [&target, dtype] { expect_all_values(target, dtype); });
      add_test(target.name + "/Dequantise", std::string("EveryShape_") + format.name,
               [&target, dtype] { expect_all_shapes(target, dtype); });
    }
  }
  static const std::vector<ProblemCase> cases = bit_cases();
  for (const Target& target : targets()) {
    for (const Op op : {Op::kForward, Op::kDx}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        for (const ProblemCase& problem : cases) {
          if (!applies(problem, op, dtype)) continue;
          if (trimmed_run() && problem.work() > 4e6) continue;
          if (target.backend == BackendKind::kReference && problem.work() > kMostReferenceWork &&
              dtype != DType::kBFloat16) {
            continue;
          }
          add_test(target.name() + "/QuantisedBits",
                   std::string(to_string(op)) + "_" + to_string(dtype) + "_" + problem.name,
                   [&target, &problem, op, dtype] {
                     expect_bits_of_decoded_weights(target, problem, op, dtype);
                   });
        }
      }
    }
  }
}

}  // namespace moegemm::testing
