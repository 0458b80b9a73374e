#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "conformance/passes/row_checks.h"
#include "conformance/suites.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"

/// copy_factors on every device: any two layouts, formats, zeros past what is given, experts left
/// out, many copies in one call.
namespace moegemm::testing {
namespace {

using Order = std::array<int, 3>;  ///< dimensions as memory has them, the slowest first
constexpr Order kDense = {0, 1, 2};
constexpr Order kPeft = {1, 2, 0};  ///< [N, r, E]

struct FactorCase {
  std::string name;
  std::array<std::int64_t, 3> shape;
  Order from = kDense;
  Order to = kDense;
  std::array<std::int64_t, 2> more = {0, 0};  ///< rows and columns that only `to` has
  std::vector<std::int64_t> m_sizes = {};     ///< empty: none given
  DType from_dtype = DType::kFloat32;
  std::int64_t padding = 0;  ///< elements after each slowest matrix of `from`
  int copies = 1;
};

/// Rows for every third expert alone.
std::vector<std::int64_t> every_third(int experts) {
  std::vector<std::int64_t> sizes(experts);
  for (int e = 0; e < experts; e += 3) sizes[e] = e + 1;
  return sizes;
}

std::vector<FactorCase> factor_cases() {
  const std::vector<std::int64_t> some = {3, 0, 1, -2, 0};
  std::vector<FactorCase> cases = {
      {"empty", {0, 4, 8}},
      {"one", {1, 1, 1}},
      {"dense", {5, 16, 200}},
      {"dense_odd", {3, 7, 13}},
      {"dense_more_rows", {4, 3, 72}, kDense, kDense, {5, 0}},
      {"dense_more_columns", {4, 10, 3}, kDense, kDense, {0, 5}},
      {"dense_padded", {4, 8, 64}, kDense, kDense, {}, {}, DType::kFloat32, 12},
      {"dense_some", {5, 8, 96}, kDense, kDense, {}, some},
      {"peft", {128, 40, 16}, kPeft},
      {"peft_few_experts", {8, 200, 16}, kPeft},
      {"peft_odd", {7, 33, 5}, kPeft, kDense, {0, 3}},
      {"peft_rank_one", {6, 50, 1}, kPeft, kDense, {0, 7}},
      {"peft_some", {5, 70, 8}, kPeft, kDense, {}, some},
      {"peft_some_of_many", {24, 30, 16}, kPeft, kDense, {}, every_third(24)},
      {"peft_large", {130, 130, 64}, kPeft},
      {"to_peft", {128, 40, 16}, kDense, kPeft},
      {"to_peft_odd", {7, 33, 5}, kDense, kPeft},
      {"to_peft_some", {5, 70, 8}, kDense, kPeft, {}, some},
      {"turned_matrices", {6, 100, 24}, {0, 2, 1}, kDense},
      {"turned_matrices_more", {6, 100, 20}, {0, 2, 1}, kDense, {0, 4}},
      {"turned_peft", {64, 24, 100}, {2, 1, 0}, kDense},
      {"experts_last_in_both", {40, 6, 9}, kPeft, {2, 1, 0}},
      {"many", {12, 20, 16}, kPeft, kDense, {}, {}, DType::kFloat32, 0, 19},
  };
  FactorCase half = {"peft_half", {64, 24, 16}, kPeft};
  half.from_dtype = DType::kFloat16;
  cases.push_back(half);
  half.name = "dense_half";
  half.from = kDense;
  cases.push_back(half);
  for (int rank = 1; rank <= 256; rank = rank < 10 ? rank + 1 : rank * 3 / 2) {
    const std::int64_t missing = (8 - rank % 8) % 8;
    cases.push_back({"b_rank_" + std::to_string(rank), {9, 34, rank}, kPeft, kDense, {0, missing}});
    cases.push_back(
        {"a_rank_" + std::to_string(rank), {9, rank, 34}, kDense, kDense, {missing, 0}});
    cases.push_back({"d_b_rank_" + std::to_string(rank), {9, 34, rank}, kDense, kPeft});
  }
  return cases;
}

std::array<std::int64_t, 3> strides_of(const std::array<std::int64_t, 3>& shape, const Order& order,
                                       std::int64_t padding) {
  std::array<std::int64_t, 3> strides = {};
  std::int64_t step = 1;
  for (int i = 2; i >= 0; --i) {
    if (i == 0) step += padding;
    strides[order[i]] = step;
    step *= shape[order[i]];
  }
  return strides;
}

std::int64_t length_of(const std::array<std::int64_t, 3>& shape,
                       const std::array<std::int64_t, 3>& strides) {
  std::int64_t last = 0;
  for (int dim = 0; dim < 3; ++dim) {
    if (shape[dim] == 0) return 0;
    last += (shape[dim] - 1) * strides[dim];
  }
  return last + 1;
}

void expect_copied(const RowTarget& target, const FactorCase& c, DType dtype) {
  Memory& memory = *target.memory;
  Random random(seed_from(c.name) + run_seed());
  auto to_shape = c.shape;
  to_shape[1] += c.more[0];
  to_shape[2] += c.more[1];
  const auto from_strides = strides_of(c.shape, c.from, c.padding);
  const auto to_strides = strides_of(to_shape, c.to, 0);
  const HostMatrix from =
      random_matrix(c.from_dtype, 1, length_of(c.shape, from_strides), 0, 0, random);
  const HostMatrix blank = poisoned_matrix(dtype, 1, length_of(to_shape, to_strides), 0, 0);
  const DeviceMatrix source(memory, from);
  const DeviceVector sizes(memory, DType::kInt32, c.m_sizes);
  std::vector<std::unique_ptr<DeviceMatrix>> results;
  std::vector<FactorCopy> copies;
  for (int i = 0; i < c.copies; ++i) {
    results.push_back(std::make_unique<DeviceMatrix>(memory, blank));
    copies.push_back({{source.view().data, c.from_dtype, c.shape, from_strides, memory.device()},
                      {results.back()->view().data, dtype, to_shape, to_strides, memory.device()},
                      0.75f + static_cast<float>(i)});
  }
  copy_factors(copies, c.m_sizes.empty() ? TensorView() : sizes.view(), memory.context());
  memory.synchronize();
  for (int i = 0; i < c.copies; ++i) {
    const std::vector<unsigned char> bytes = results[i]->download();
    for (std::int64_t e = 0; e < to_shape[0]; ++e) {
      for (std::int64_t r = 0; r < to_shape[1]; ++r) {
        for (std::int64_t k = 0; k < to_shape[2]; ++k) {
          const std::int64_t at = e * to_strides[0] + r * to_strides[1] + k * to_strides[2];
          if (!c.m_sizes.empty() && c.m_sizes[e] <= 0) {
            ASSERT_TRUE(is_poison(dtype, bytes.data(), at)) << Place{"left out", r, k};
            continue;
          }
          float want = 0;
          if (r < c.shape[1] && k < c.shape[2]) {
            const std::int64_t given =
                e * from_strides[0] + r * from_strides[1] + k * from_strides[2];
            want = from.row(0)[given] * copies[i].scaling;
          }
          float rounded = 0;
          encode(dtype, &rounded, 0, want);
          if (!expect_close(dtype, bytes, at, decode(dtype, &rounded, 0), 0, {"to", r, k})) return;
        }
      }
    }
    EXPECT_TRUE(results[i]->guards_intact());
  }
}

}  // namespace

void add_factor_tests() {
  static const std::vector<FactorCase> cases = factor_cases();
  constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (const RowTarget& target : row_targets()) {
    for (int d = 0; d < 3; ++d) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const FactorCase& c = cases[i];
        const DType dtype = kDtypes[d];
        if (!kept(i, d, c.shape[0] * c.shape[1] * c.shape[2])) continue;
        add_test(target.name + "/CopyFactors", c.name + "_" + to_string(dtype),
                 [&target, &c, dtype] { expect_copied(target, c, dtype); });
      }
    }
  }
}

}  // namespace moegemm::testing
