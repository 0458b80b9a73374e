#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/registry.h"
#include "cpu/element_type.h"
#include "cpu/simd/isa/instruction_set.h"

/// One product with random operands, run on any backend straight through its interface. Gaps
/// between rows hold NaN, and so does every output before a run.
namespace moegemm::cpu::simd {

struct CaseShape {
  Op op = Op::kForward;
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  std::int64_t n = 1;
  std::int64_t k = 1;
  std::vector<std::int64_t> sizes;  ///< m_sizes, may be nonsense
  std::int64_t topk = 1;
  std::int64_t spare_rows = 0;  ///< rows after sum(sizes)
  Permutation permutation = Permutation::kNone;
  bool multiply = false;
  bool accumulate = false;
  std::int64_t gap = 0;  ///< elements between rows
  DType index_dtype = DType::kInt32;
  unsigned seed = 1;
};

class Case {
 public:
  explicit Case(const CaseShape& shape) : shape_(shape), random_(shape.seed) {
    std::int64_t rows = shape.spare_rows;
    for (std::int64_t size : shape.sizes) rows += std::max<std::int64_t>(size, 0);
    rows = (rows + shape.topk - 1) / shape.topk * shape.topk;
    problem_.op = shape.op;
    problem_.dtype = shape.dtype;
    problem_.out_dtype = shape.out_dtype;
    problem_.experts = static_cast<std::int64_t>(shape.sizes.size());
    problem_.n = shape.n;
    problem_.k = shape.k;
    problem_.rows = rows;
    problem_.topk = shape.topk;
    problem_.permutation = shape.permutation;
    problem_.multiply = shape.multiply;
    problem_.accumulate = shape.accumulate;
    problem_.sizes_dtype = shape.index_dtype;
    problem_.index_dtype = shape.index_dtype;

    const std::int64_t x_rows = shape.permutation == Permutation::kX ? rows / shape.topk : rows;
    x_stride_ = shape.k + shape.gap;
    dy_stride_ = shape.n + shape.gap;
    x_ = matrix(x_rows, shape.k, x_stride_);
    w_ = matrix(problem_.experts * shape.n, shape.k, x_stride_);
    dy_ = matrix(rows, shape.n, dy_stride_);
    sizes_ = pack_indices(shape.sizes);
    std::vector<std::int64_t> flat(rows);
    std::iota(flat.begin(), flat.end(), 0);
    std::shuffle(flat.begin(), flat.end(), random_);
    set_indices(flat);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (std::int64_t i = 0; i < rows; ++i) weights_.push_back(uniform(random_));
  }

  const Problem& problem() const { return problem_; }
  void set_indices(const std::vector<std::int64_t>& flat) { indices_ = pack_indices(flat); }
  void set_sizes(const std::vector<std::int64_t>& sizes) { sizes_ = pack_indices(sizes); }
  std::vector<std::byte>& x() { return x_; }
  std::vector<std::byte>& w() { return w_; }
  std::vector<std::byte>& dy() { return dy_; }
  std::int64_t x_stride() const { return x_stride_; }
  std::int64_t dy_stride() const { return dy_stride_; }

  std::int64_t out_rows() const {
    return shape_.op == Op::kDw ? problem_.experts * problem_.n : problem_.rows;
  }
  std::int64_t out_cols() const { return shape_.op == Op::kForward ? problem_.n : problem_.k; }

  /// The output, row by row without the gaps; fails if a gap was written.
  std::vector<float> run(const Backend& backend, int kernel,
                         const ExecutionContext& context = {}) const {
    const std::int64_t stride = out_cols() + shape_.gap;
    std::vector<std::byte> out(
        static_cast<std::size_t>(out_rows() * stride * size_bytes(problem_.out_dtype)),
        std::byte{0xff});
    if (shape_.accumulate) {
      for (std::int64_t i = 0; i < out_rows() * stride; ++i) {
        write_float(out.data(), problem_.out_dtype, i, static_cast<float>(i % 7) - 3);
      }
    }
    Operands operands;
    operands.x = x_.data();
    operands.w = w_.data();
    operands.dy = dy_.data();
    operands.out = out.data();
    operands.x_stride = x_stride_;
    operands.w_stride = x_stride_;
    operands.dy_stride = dy_stride_;
    operands.out_stride = stride;
    operands.m_sizes = sizes_.data();
    if (shape_.permutation != Permutation::kNone) operands.gather_indices = indices_.data();
    if (shape_.multiply) operands.router_weights = weights_.data();
    backend.launch(backend.plan_with(problem_, kernel), problem_, operands, context);
    std::vector<float> dense;
    for (std::int64_t r = 0; r < out_rows(); ++r) {
      for (std::int64_t c = 0; c < stride; ++c) {
        const float value = read_float(out.data(), problem_.out_dtype, r * stride + c);
        if (c < out_cols()) {
          dense.push_back(value);
        } else if (!shape_.accumulate && !std::isnan(value)) {
          throw std::runtime_error("the gap after output row " + std::to_string(r) +
                                   " was written");
        }
      }
    }
    return dense;
  }

  std::vector<float> reference() const {
    return run(reference_backend(), reference_backend().choose(problem_));
  }

  /// How far an element may be from the reference: one rounding of the output dtype, and the
  /// rounding of a sum of `terms` products of numbers below 1.
  double tolerance(float expected) const {
    const double terms =
        static_cast<double>(shape_.op == Op::kForward ? problem_.k
                            : shape_.op == Op::kDx    ? problem_.n
                                                      : std::max<std::int64_t>(problem_.rows, 1));
    const double unit = problem_.out_dtype == DType::kBFloat16  ? 0x1p-7
                        : problem_.out_dtype == DType::kFloat16 ? 0x1p-10
                                                                : 0x1p-22;
    return unit * std::abs(expected) + terms * 0x1p-23 + 0x1p-24;
  }

 private:
  std::vector<std::byte> matrix(std::int64_t rows, std::int64_t cols, std::int64_t stride) {
    std::vector<std::byte> data(static_cast<std::size_t>(rows * stride * size_bytes(shape_.dtype)),
                                std::byte{0xff});
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        write_float(data.data(), shape_.dtype, r * stride + c, uniform(random_));
      }
    }
    return data;
  }

  std::vector<std::byte> pack_indices(const std::vector<std::int64_t>& values) const {
    const bool narrow = shape_.index_dtype == DType::kInt32;
    std::vector<std::byte> data(values.size() * (narrow ? 4 : 8));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int32_t low = static_cast<std::int32_t>(values[i]);
      if (narrow) {
        std::memcpy(data.data() + i * 4, &low, 4);
      } else {
        std::memcpy(data.data() + i * 8, &values[i], 8);
      }
    }
    return data;
  }

  CaseShape shape_;
  std::mt19937 random_;
  Problem problem_;
  std::int64_t x_stride_ = 0;
  std::int64_t dy_stride_ = 0;
  std::vector<std::byte> x_, w_, dy_, sizes_, indices_;
  std::vector<float> weights_;
};

/// The kernels of `backend` that run `problem`.
inline std::vector<int> feasible_kernels(const Backend& backend, const Problem& problem) {
  std::vector<int> feasible;
  for (std::size_t i = 0; i < backend.kernels().size(); ++i) {
    if (backend.refuse(problem, backend.kernels()[i]).empty()) {
      feasible.push_back(static_cast<int>(i));
    }
  }
  return feasible;
}

}  // namespace moegemm::cpu::simd
