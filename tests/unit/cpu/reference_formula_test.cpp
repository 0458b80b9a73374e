#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/element_type.h"
#include "moegemm/moegemm.h"

/// The reference against the formulas of the operation, written down a second time: one sum per
/// output element over all rows that belong to it, with no segment, no offset and no early exit.
namespace moegemm {
namespace {

constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kN = 3;
constexpr std::int64_t kK = 5;
constexpr std::int64_t kWeightRows = kExperts * kN;
constexpr std::int64_t kTokens = 7;
constexpr std::int64_t kTopk = 2;
constexpr std::int64_t kRows = kTokens * kTopk;
constexpr std::int64_t kPad = 2;  // elements between rows, filled with NaN

/// Floats in one of the storage formats, rows `cols + kPad` apart.
struct Storage {
  DType dtype;
  std::int64_t rows;
  std::int64_t cols;
  std::vector<unsigned char> bytes;

  Storage(DType type, std::int64_t row_count, std::int64_t col_count)
      : dtype(type),
        rows(row_count),
        cols(col_count),
        bytes(row_count * (col_count + kPad) * size_bytes(type)) {
    for (std::int64_t i = 0; i < rows * (cols + kPad); ++i) {
      write(i, std::numeric_limits<float>::quiet_NaN());
    }
  }
  void set(std::int64_t row, std::int64_t col, float value) {
    write(row * (cols + kPad) + col, value);
  }
  float get(std::int64_t row, std::int64_t col) const {
    const void* at = bytes.data() + (row * (cols + kPad) + col) * size_bytes(dtype);
    float value;
    switch (dtype) {
      case DType::kBFloat16:
        return to_float(*static_cast<const BFloat16*>(at));
      case DType::kFloat16:
        return to_float(*static_cast<const Float16*>(at));
      default:
        std::memcpy(&value, at, sizeof(value));
        return value;
    }
  }
  void write(std::int64_t i, float value) {
    void* at = bytes.data() + i * size_bytes(dtype);
    switch (dtype) {
      case DType::kBFloat16:
        *static_cast<BFloat16*>(at) = to_bfloat16(value);
        return;
      case DType::kFloat16:
        *static_cast<Float16*>(at) = to_float16(value);
        return;
      default:
        std::memcpy(at, &value, sizeof(value));
    }
  }
  TensorView view() const {
    return TensorView::matrix(bytes.data(), dtype, rows, cols, cols + kPad);
  }
};

enum class Routing { kEven, kPadded, kBadSizes, kBadIndices };

struct Flags {
  Permutation permutation;
  bool multiply;
};

using Case = std::tuple<Op, Flags, DType, bool, Routing>;

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const auto& [op, flags, dtype, out_float, routing] = info.param;
  const char* routings[] = {"even", "padded", "bad_sizes", "bad_indices"};
  return std::string(to_string(op)) + "_" + to_string(flags.permutation) +
         (flags.multiply ? "_mul_" : "_") + to_string(dtype) + (out_float ? "_to_fp32_" : "_") +
         routings[static_cast<int>(routing)];
}

class ReferenceFormula : public ::testing::TestWithParam<Case> {
 protected:
  ReferenceFormula() {
    std::mt19937 random(42);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const auto fill = [&](Storage& storage) {
      for (std::int64_t r = 0; r < storage.rows; ++r) {
        for (std::int64_t c = 0; c < storage.cols; ++c) storage.set(r, c, uniform(random));
      }
    };
    fill(x);
    fill(w);
    fill(dy);
    for (float& weight : weights) weight = uniform(random);
    for (std::int64_t i = 0; i < kRows; ++i) indices[i] = (5 * i + 3) % kRows;  // a permutation
    switch (kind) {
      case Routing::kEven:
        sizes = {3, 0, 6, 5};
        break;
      case Routing::kPadded:
        sizes = {0, 4, 5, 0};
        break;
      case Routing::kBadSizes:
        sizes = {4, -2, std::numeric_limits<std::int64_t>::max(), 3};
        break;
      case Routing::kBadIndices:
        sizes = {3, 0, 6, 5};
        indices[0] = -1;
        indices[4] = kRows;
        indices[13] = std::numeric_limits<std::int64_t>::min();
        break;
    }
  }

  /// The expert of a position, or -1; by walking the sizes, negative ones skipped.
  int expert_of(std::int64_t position) const {
    double end = 0;
    for (int e = 0; e < kExperts; ++e) {
      end += std::max(0.0, static_cast<double>(sizes[e]));
      if (static_cast<double>(position) < end) return e;
    }
    return -1;
  }
  bool readable(std::int64_t position) const {
    return permutation == Permutation::kNone ||
           (indices[position] >= 0 && indices[position] < kRows);
  }
  double factor(std::int64_t position) const {
    return multiply ? static_cast<double>(weights[indices[position]]) : 1.0;
  }
  double x_at(std::int64_t position, std::int64_t k) const {
    return x.get(permutation == Permutation::kX ? indices[position] / kTopk : position, k);
  }
  double dy_at(std::int64_t position, std::int64_t n) const {
    return dy.get(
        permutation == Permutation::kY && op != Op::kForward ? indices[position] : position, n);
  }
  /// The position whose result lands in output row `row`, or -1.
  std::int64_t position_of(std::int64_t row) const {
    const bool scattered = (op == Op::kForward && permutation == Permutation::kY) ||
                           (op == Op::kDx && permutation == Permutation::kX);
    if (!scattered) return row;
    for (std::int64_t position = 0; position < kRows; ++position) {
      if (indices[position] == row) return position;
    }
    return -1;
  }
  double expected(std::int64_t row, std::int64_t col) const {
    double sum = 0;
    if (op == Op::kDw) {
      for (std::int64_t r = 0; r < kRows; ++r) {
        if (expert_of(r) != row / kN || !readable(r)) continue;
        sum += factor(r) * dy_at(r, row % kN) * x_at(r, col);
      }
      return sum;
    }
    const std::int64_t position = position_of(row);
    if (position < 0 || !readable(position) || expert_of(position) < 0) return 0;
    const std::int64_t expert = expert_of(position);
    if (op == Op::kForward) {
      for (std::int64_t k = 0; k < kK; ++k) sum += x_at(position, k) * w.get(expert * kN + col, k);
    } else {
      for (std::int64_t n = 0; n < kN; ++n) sum += dy_at(position, n) * w.get(expert * kN + n, col);
    }
    return factor(position) * sum;
  }

  const Op op = std::get<0>(GetParam());
  const Permutation permutation = std::get<1>(GetParam()).permutation;
  const bool multiply = std::get<1>(GetParam()).multiply;
  const DType dtype = std::get<2>(GetParam());
  const bool out_float = std::get<3>(GetParam());
  const Routing kind = std::get<4>(GetParam());
  Storage x{dtype, permutation == Permutation::kX ? kTokens : kRows, kK};
  Storage w{dtype, kWeightRows, kK};
  Storage dy{dtype, kRows, kN};
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> indices = std::vector<std::int64_t>(kRows);
  std::vector<float> weights = std::vector<float>(kRows);
};

TEST_P(ReferenceFormula, EveryElementIsTheFormulaRoundedOnce) {
  const std::int64_t out_rows = op == Op::kDw ? kWeightRows : kRows;
  const std::int64_t out_cols = op == Op::kForward ? kN : kK;
  Storage out(out_float ? DType::kFloat32 : dtype, out_rows, out_cols);

  RoutingView routing;
  routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt64, kExperts);
  routing.gather_indices = TensorView::vector(indices.data(), DType::kInt64, kRows);
  routing.router_weights = TensorView::matrix(weights.data(), DType::kFloat32, kTokens, kTopk);
  routing.topk = kTopk;
  GemmOptions options;
  options.permute_x = permutation == Permutation::kX;
  options.permute_y = permutation == Permutation::kY;
  options.multiply = multiply;
  options.backend = BackendKind::kReference;
  if (op == Op::kForward) forward(x.view(), w.view(), out.view(), routing, options);
  if (op == Op::kDx) backward_dx(dy.view(), w.view(), out.view(), routing, options);
  if (op == Op::kDw) backward_dw(dy.view(), x.view(), out.view(), routing, options);

  for (std::int64_t r = 0; r < out_rows; ++r) {
    for (std::int64_t c = 0; c < out_cols; ++c) {
      Storage rounded(out.dtype, 1, 1);
      rounded.set(0, 0, static_cast<float>(expected(r, c)));
      EXPECT_FLOAT_EQ(out.get(r, c), rounded.get(0, 0)) << "row " << r << " col " << c;
    }
    for (std::int64_t pad = 0; pad < kPad; ++pad) {
      EXPECT_TRUE(std::isnan(out.get(r, out_cols + pad))) << "written between rows, row " << r;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ReferenceFormula,
    ::testing::Combine(
        ::testing::Values(Op::kForward, Op::kDx, Op::kDw),
        ::testing::Values(Flags{Permutation::kNone, false}, Flags{Permutation::kX, false},
                          Flags{Permutation::kY, false}, Flags{Permutation::kY, true}),
        ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16), ::testing::Bool(),
        ::testing::Values(Routing::kEven, Routing::kPadded, Routing::kBadSizes,
                          Routing::kBadIndices)),
    name_of);

}  // namespace
}  // namespace moegemm
