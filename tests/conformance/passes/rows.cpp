#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>

#include "conformance/driver/targets.h"
#include "conformance/passes/row_checks.h"
#include "conformance/suites.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/random.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {
namespace {

struct CombineCase {
  std::string name;
  std::int64_t tokens = 33;
  std::int64_t topk = 4;
  std::int64_t cols = 64;
  std::int64_t padding = 0;
  std::int64_t offset = 0;  ///< elements before the first row
  bool fp32_output = false;
  enum class Weights { kNone, kFp32, kSame, kMatrix } weights = Weights::kFp32;
  bool nan_row = false;
};

std::vector<CombineCase> combine_cases() {
  using Weights = CombineCase::Weights;
  std::vector<CombineCase> cases = {
      {.name = "NoTokens", .tokens = 0},
      {.name = "OneToken", .tokens = 1},
      {.name = "PlainSum", .weights = Weights::kNone},
      {.name = "WeightsInTheRowsDtype", .weights = Weights::kSame},
      {.name = "WeightsAsMatrix", .weights = Weights::kMatrix},
      {.name = "Fp32Output", .fp32_output = true},
      {.name = "Strided", .padding = 8},
      {.name = "StridedUnaligned", .cols = 37, .padding = 3},
      {.name = "StridedPacksAndSingleColumns", .cols = 61, .padding = 3},
      {.name = "Offset", .offset = 8},
      {.name = "OffsetUnaligned", .offset = 1},
      {.name = "OffsetUnalignedFp32Output",
       .cols = 37,
       .padding = 3,
       .offset = 1,
       .fp32_output = true},
      {.name = "NanStaysInItsToken", .nan_row = true},
      {.name = "ManyTokens", .tokens = 3000, .topk = 8, .cols = 128},
      {.name = "WideRows", .tokens = 5, .topk = 2, .cols = 7168},
  };
  for (const std::int64_t cols : {1, 2, 3, 7, 8, 9, 15, 31, 33, 63, 65, 127, 129, 255, 256, 1000}) {
    cases.push_back({.name = "Cols" + std::to_string(cols), .cols = cols});
  }
  for (const std::int64_t topk : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 17, 22}) {
    cases.push_back({.name = "Topk" + std::to_string(topk), .topk = topk, .cols = 40});
  }
  return cases;
}

void expect_combine(const RowTarget& target, const CombineCase& c, DType dtype) {
  Memory& memory = *target.memory;
  Random random(seed_from(c.name) + run_seed());
  const std::int64_t count = c.tokens * c.topk;
  HostMatrix rows = random_matrix(dtype, count, c.cols, c.padding, c.offset, random);
  if (c.nan_row) rows.set(2 * c.topk + 1, c.cols / 2, kNan);
  const DType out_dtype = c.fp32_output ? DType::kFloat32 : dtype;
  const DType weights_dtype = c.weights == CombineCase::Weights::kSame ? dtype : DType::kFloat32;
  const std::vector<float> weights = random_weights(weights_dtype, count, random);
  const HostMatrix out = poisoned_matrix(out_dtype, c.tokens, c.cols, c.padding, c.offset);

  const DeviceMatrix device_rows(memory, rows);
  const DeviceMatrix device_out(memory, out);
  const DeviceVector device_weights(memory, weights_dtype, weights);
  TensorView weights_view = device_weights.view();
  if (c.weights == CombineCase::Weights::kNone) weights_view = {};
  if (c.weights == CombineCase::Weights::kMatrix) {
    weights_view =
        TensorView::matrix(weights_view.data, weights_dtype, c.tokens, c.topk, 0, memory.device());
  }
  combine(device_rows.view(), weights_view, c.topk, device_out.view(), memory.context());
  memory.synchronize();

  const std::vector<unsigned char> bytes = device_out.download();
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t col = 0; col < c.cols; ++col) {
      double sum = 0;
      double squares = 0;
      for (std::int64_t s = 0; s < c.topk; ++s) {
        const std::int64_t row = t * c.topk + s;
        const double weight = c.weights == CombineCase::Weights::kNone ? 1.0 : weights[row];
        const double term = weight * rows.row(row)[col];
        sum += term;
        squares += term * term;
      }
      if (!expect_close(out_dtype, bytes, out.position(t, col), sum,
                        sum_bound(out_dtype, c.topk, sum, squares), {"out", t, col})) {
        return;
      }
    }
  }
  expect_untouched_padding(out, bytes);
  EXPECT_TRUE(device_out.guards_intact());
}

/// Rows anywhere, some slots without one: the bits of `combine` with those rows in flat order and
/// zeros for the others.
void expect_combine_rows(const RowTarget& target, const CombineCase& c, DType dtype) {
  Memory& memory = *target.memory;
  Random random(seed_from(c.name) + run_seed());
  const std::int64_t slots = c.tokens * c.topk, count = slots + 3;
  HostMatrix rows = random_matrix(dtype, count, c.cols, c.padding, c.offset, random);
  std::vector<std::int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t i = count - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
  const std::int64_t nowhere[] = {-1, -100, count, count + 1000};
  HostMatrix flat = random_matrix(dtype, slots, c.cols, c.padding, c.offset, random);
  std::vector<std::int64_t> positions(order.begin(), order.begin() + slots);
  for (std::int64_t i = 0; i < slots; ++i) {
    const bool missing = random.chance(3);
    for (std::int64_t col = 0; col < c.cols; ++col) {
      flat.set(i, col, missing ? 0.0f : rows.row(positions[i])[col]);
      if (missing) rows.set(positions[i], col, kNan);  // nobody reads it
    }
    if (missing) positions[i] = nowhere[random.below(4)];
  }
  const DType out_dtype = c.fp32_output ? DType::kFloat32 : dtype;
  const DType weights_dtype = c.weights == CombineCase::Weights::kSame ? dtype : DType::kFloat32;
  const std::vector<float> weights = random_weights(weights_dtype, slots, random);
  const HostMatrix out = poisoned_matrix(out_dtype, c.tokens, c.cols, c.padding, c.offset);
  const DeviceMatrix device_rows(memory, rows), device_flat(memory, flat);
  const DeviceMatrix by_position(memory, out), in_order(memory, out);
  const DeviceVector device_weights(memory, weights_dtype, weights);
  const DeviceVector device_positions(memory, c.topk % 2 ? DType::kInt32 : DType::kInt64,
                                      positions);
  const TensorView weights_view =
      c.weights == CombineCase::Weights::kNone ? TensorView{} : device_weights.view();
  combine(device_flat.view(), weights_view, c.topk, in_order.view(), memory.context());
  combine_rows(device_rows.view(), weights_view,
               TensorView::matrix(device_positions.view().data, device_positions.view().dtype,
                                  c.tokens, c.topk, 0, memory.device()),
               by_position.view(), memory.context());
  memory.synchronize();
  EXPECT_EQ(by_position.download(), in_order.download());
  EXPECT_TRUE(by_position.guards_intact());
}

struct ScaleCase {
  std::string name;
  std::vector<std::int64_t> m_sizes = {20, 0, 33, 1, 6};
  std::int64_t rows = 72;  ///< 12 of them past the segments
  std::int64_t cols = 64;
  std::int64_t topk = 2;
  std::int64_t padding = 0;
  std::int64_t offset = 0;  ///< elements before the first row
  bool with_scaled_x = true;
  bool in_place = false;
  bool fp32_product = false;
  bool fp32_outputs = false;  ///< scaled and dot; scaled_x has x's dtype
  bool same_weights = false;
  std::vector<std::int64_t> bad_indices = {};
  bool nan_tail = false;
  DType index_dtype = DType::kInt32;
  DType sizes_dtype = DType::kInt32;
};

std::vector<ScaleCase> scale_cases() {
  std::vector<ScaleCase> cases = {
      {.name = "NoRows", .m_sizes = {0, 0}, .rows = 0},
      {.name = "Plain"},
      {.name = "WithoutScaledX", .with_scaled_x = false},
      {.name = "InPlace", .in_place = true},
      {.name = "Fp32Product", .fp32_product = true},
      {.name = "Fp32Outputs", .fp32_outputs = true},
      {.name = "Fp32ProductAndOutputs", .fp32_product = true, .fp32_outputs = true},
      {.name = "WeightsInXsDtype", .same_weights = true},
      {.name = "Int64Indices", .index_dtype = DType::kInt64},
      {.name = "Int64Sizes", .m_sizes = {20, -1, 33, 1, 6}, .sizes_dtype = DType::kInt64},
      {.name = "Strided", .padding = 8},
      {.name = "StridedUnaligned", .cols = 37, .padding = 3},
      {.name = "Offset", .offset = 8},
      {.name = "OffsetUnaligned", .offset = 1},
      {.name = "OffsetUnalignedFp32Outputs", .cols = 37, .offset = 1, .fp32_outputs = true},
      {.name = "ManyExperts", .m_sizes = std::vector<std::int64_t>(300, 7), .rows = 2200},
      {.name = "NanPastTheSegments", .nan_tail = true},
      {.name = "SizesExceedRows", .m_sizes = {30, 100, 7}, .rows = 72},
      {.name = "NegativeSizes", .m_sizes = {-3, 30, -9, 7}, .rows = 72},
      {.name = "IndicesOutOfRange", .bad_indices = {-1, 72, 1000, -100, 2147483647}},
      {.name = "Indices64BitTruncate",
       .bad_indices = {std::int64_t{1} << 32, (std::int64_t{1} << 32) + 5},
       .index_dtype = DType::kInt64},
      {.name = "Wide", .cols = 7168},
      {.name = "WideInPlace", .cols = 200, .in_place = true},
      {.name = "WideFp32Product", .cols = 200, .fp32_product = true},
      {.name = "WideNanPastTheSegments", .cols = 200, .nan_tail = true},
      {.name = "WideIndicesOutOfRange", .cols = 200, .bad_indices = {-1, 72, 1000, -100}},
      {.name = "Many", .m_sizes = {2000, 0, 1000}, .rows = 3072, .cols = 72, .topk = 8},
      {.name = "ManyNarrow", .m_sizes = {60000, 0, 50000}, .rows = 110011, .cols = 16, .topk = 1},
  };
  for (const std::int64_t cols : {1, 2, 3, 7, 8, 9, 24, 31, 33, 40, 65, 127, 128, 136, 257, 1000}) {
    cases.push_back({.name = "Cols" + std::to_string(cols), .cols = cols});
  }
  return cases;
}

void expect_scale_rows(const RowTarget& target, const ScaleCase& c, DType dtype) {
  Memory& memory = *target.memory;
  ProblemCase spec;  // builds segments and indices
  spec.name = c.name;
  spec.m_sizes = c.m_sizes;
  spec.rows = c.rows;
  spec.n = 1;  // nothing here looks at W
  spec.k = c.cols;
  spec.topk = c.topk;
  spec.permutation = Permutation::kY;
  spec.multiply = true;
  spec.weights_in_fp32 = !c.same_weights;
  spec.bad_indices = c.bad_indices;
  spec.x_padding = c.padding;
  spec.base_offset = c.offset;
  HostProblem p = build_problem(spec, Op::kForward, dtype, seed_from(c.name) + run_seed());
  Random random(run_seed());
  const DType product_dtype = c.fp32_product ? DType::kFloat32 : dtype;
  HostMatrix product = random_matrix(product_dtype, c.rows, c.cols, c.padding, c.offset, random);
  for (std::int64_t r = p.begins.back(); c.nan_tail && r < c.rows; ++r) {
    p.x.set(r, 0, kNan);
    product.set(r, c.cols - 1, kInf);
  }

  const DType out_dtype = c.fp32_outputs ? DType::kFloat32 : dtype;
  const HostMatrix blank = poisoned_matrix(out_dtype, c.rows, c.cols, c.padding, c.offset);
  const DeviceMatrix device_product(memory, product), device_x(memory, p.x);
  const DeviceMatrix device_scaled(memory, c.in_place ? product : blank);
  const HostMatrix blank_x = poisoned_matrix(dtype, c.rows, c.cols, c.padding, c.offset);
  const DeviceMatrix device_scaled_x(memory, blank_x);
  const DeviceVector device_dot(memory, out_dtype, c.rows);
  const DeviceVector sizes(memory, c.sizes_dtype, c.m_sizes);
  const DeviceVector indices(memory, c.index_dtype, p.gather_indices);
  const DeviceVector weights(memory, p.weights_dtype, p.router_weights);
  const RoutingView routing{sizes.view(), indices.view(), weights.view(), c.topk};
  const TensorView& source = c.in_place ? device_scaled.view() : device_product.view();
  scale_rows(source, device_x.view(), routing, device_scaled.view(), device_dot.view(),
             c.with_scaled_x ? device_scaled_x.view() : TensorView{}, memory.context());
  memory.synchronize();

  const DType scaled_dtype = device_scaled.view().dtype;
  const std::vector<unsigned char> scaled = device_scaled.download();
  const std::vector<unsigned char> scaled_x = device_scaled_x.download();
  const std::vector<unsigned char> dot = device_dot.download();
  std::vector<double> dots(c.rows, 0.0), squares(c.rows, 0.0);
  for (std::int64_t r = 0; r < c.rows; ++r) {
    const bool used = p.owners[r] >= 0 && p.index_valid(r);
    const double weight = used ? p.scale(r) : 0.0;
    for (std::int64_t col = 0; col < c.cols; ++col) {
      const double g = used ? product.row(r)[col] : 0.0;
      const double x = used ? p.x.row(r)[col] : 0.0;
      if (!expect_close(scaled_dtype, scaled, blank.position(r, col), weight * g,
                        sum_bound(scaled_dtype, 1, weight * g, 0), {"scaled", r, col})) {
        return;
      }
      if (c.with_scaled_x &&
          !expect_close(dtype, scaled_x, blank_x.position(r, col), weight * x,
                        sum_bound(dtype, 1, weight * x, 0), {"scaled_x", r, col})) {
        return;
      }
      if (used) {
        dots[p.gather_indices[r]] += g * x;
        squares[p.gather_indices[r]] += g * x * g * x;
      }
    }
  }
  for (std::int64_t i = 0; i < c.rows; ++i) {
    if (!expect_close(out_dtype, dot, i, dots[i], sum_bound(out_dtype, c.cols, dots[i], squares[i]),
                      {"dot", i, 0})) {
      return;
    }
  }
  if (!c.in_place) expect_untouched_padding(blank, scaled);
  expect_untouched_padding(blank_x, scaled_x);
  EXPECT_TRUE(device_scaled.guards_intact() && device_scaled_x.guards_intact() &&
              device_dot.guards_intact());
}

}  // namespace

void add_row_tests() {
  static const std::vector<CombineCase> combines = combine_cases();
  static const std::vector<ScaleCase> scales = scale_cases();
  constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (const RowTarget& target : row_targets()) {
    for (int d = 0; d < 3; ++d) {
      const DType dtype = kDtypes[d];
      for (std::size_t i = 0; i < combines.size(); ++i) {
        const CombineCase& c = combines[i];
        if (!kept(i, d, c.tokens * c.topk * c.cols)) continue;
        add_test(target.name + "/Combine", c.name + "_" + to_string(dtype),
                 [&target, &c, dtype] { expect_combine(target, c, dtype); });
        add_test(target.name + "/CombineRows", c.name + "_" + to_string(dtype),
                 [&target, &c, dtype] { expect_combine_rows(target, c, dtype); });
      }
      for (std::size_t i = 0; i < scales.size(); ++i) {
        const ScaleCase& c = scales[i];
        if (!kept(i, d, c.rows * c.cols)) continue;
        add_test(target.name + "/ScaleRows", c.name + "_" + to_string(dtype),
                 [&target, &c, dtype] { expect_scale_rows(target, c, dtype); });
      }
    }
  }
}

}  // namespace moegemm::testing
