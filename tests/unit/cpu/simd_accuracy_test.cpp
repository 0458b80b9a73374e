#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "unit/cpu/simd_case.h"

namespace moegemm::cpu::simd {
namespace {

/// Every instruction set that this machine has, against the plain loops.
class SimdAccuracy : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void expect_matches_reference(const Case& c, const std::string& what) {
    expect_matches(c, c.reference(), what);
  }
  void expect_matches(const Case& c, const std::vector<float>& expected, const std::string& what) {
    const Backend& backend = backend_for(GetParam());
    for (int kernel : feasible_kernels(backend, c.problem())) {
      const std::vector<float> actual = c.run(backend, kernel);
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
        ASSERT_LE(std::abs(actual[i] - expected[i]), c.tolerance(expected[i]))
            << what << " " << backend.kernels()[kernel].name << " " << to_string(c.problem())
            << " row " << i / c.out_cols() << " column " << i % c.out_cols() << ": " << actual[i]
            << " instead of " << expected[i];
      }
    }
  }
};

constexpr Op kOps[] = {Op::kForward, Op::kDx, Op::kDw};
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

TEST_P(SimdAccuracy, EmptyProblemsRun) {
  for (Op op : kOps) {
    CaseShape shape;
    shape.op = op;
    shape.n = 5;
    shape.k = 3;
    shape.sizes = {0, 0};
    expect_matches_reference(Case(shape), "no rows");
  }
}

TEST_P(SimdAccuracy, EveryTailOfKAndN) {
  unsigned seed = 1;
  for (Op op : kOps) {
    for (DType dtype : kDTypes) {
      for (std::int64_t extent = 1; extent <= 70; ++extent) {
        for (bool along_k : {true, false}) {
          CaseShape shape;
          shape.op = op;
          shape.dtype = dtype;
          shape.out_dtype = extent % 2 == 0 ? DType::kFloat32 : dtype;
          shape.k = along_k ? extent : 19;
          shape.n = along_k ? 11 : extent;
          shape.sizes = {3, 0, 7};
          shape.gap = extent % 3;
          shape.seed = seed++;
          expect_matches_reference(Case(shape), "tail");
        }
      }
    }
  }
}

TEST_P(SimdAccuracy, EveryNumberOfRows) {
  unsigned seed = 1000;
  for (Op op : kOps) {
    for (DType dtype : kDTypes) {
      for (std::int64_t rows = 1; rows <= 20; ++rows) {
        CaseShape shape;
        shape.op = op;
        shape.dtype = dtype;
        shape.out_dtype = dtype;
        shape.n = 67;
        shape.k = 131;
        shape.sizes = {rows, 1, 21 - rows};
        shape.seed = seed++;
        expect_matches_reference(Case(shape), "rows");
      }
    }
  }
}

TEST_P(SimdAccuracy, EveryFlag) {
  unsigned seed = 2000;
  for (Op op : kOps) {
    for (DType dtype : kDTypes) {
      for (Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
        for (bool multiply : {false, true}) {
          if (multiply && permutation != Permutation::kY) continue;
          for (bool accumulate : {false, true}) {
            if (accumulate && op != Op::kDw) continue;
            for (DType index : {DType::kInt32, DType::kInt64}) {
              CaseShape shape;
              shape.op = op;
              shape.dtype = dtype;
              shape.out_dtype = accumulate || seed % 2 == 0 ? DType::kFloat32 : dtype;
              shape.n = 37;
              shape.k = 45;
              shape.sizes = {4, 0, 13, 1, 6};
              shape.topk = 2;
              shape.spare_rows = 4;
              shape.permutation = permutation;
              shape.multiply = multiply;
              shape.accumulate = accumulate;
              shape.gap = 3;
              shape.index_dtype = index;
              shape.seed = seed++;
              expect_matches_reference(Case(shape), "flags");
            }
          }
        }
      }
    }
  }
}

TEST_P(SimdAccuracy, SizesAndIndicesOutOfRange) {
  for (Op op : kOps) {
    for (Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
      CaseShape shape;
      shape.op = op;
      shape.n = 9;
      shape.k = 33;
      shape.sizes = {-5, 6, -1, 9, 4};
      shape.permutation = permutation;
      shape.multiply = permutation == Permutation::kY;
      shape.index_dtype = DType::kInt64;
      Case c(shape);
      std::vector<std::int64_t> flat(c.problem().rows);
      for (std::size_t i = 0; i < flat.size(); ++i) {
        flat[i] = static_cast<std::int64_t>(flat.size() - 1 - i);
      }
      flat[0] = -1;
      flat[3] = static_cast<std::int64_t>(flat.size());
      flat[7] = std::numeric_limits<std::int64_t>::max();
      flat[8] = std::numeric_limits<std::int64_t>::min();
      flat[12] = flat[13];  // the later position wins
      c.set_indices(flat);
      expect_matches_reference(c, "bad indices");
    }
  }
}

TEST_P(SimdAccuracy, SegmentsAreClippedAtM) {
  for (Op op : kOps) {
    CaseShape shape;
    shape.op = op;
    shape.n = 9;
    shape.k = 33;
    shape.sizes = {6, 9, 4};
    Case c(shape);
    c.set_sizes({4, 1000000, 4});
    expect_matches_reference(c, "oversized");
    c.set_sizes({2147483647, 2147483647, 2147483647});
    expect_matches_reference(c, "sizes whose sum overflows");
  }
}

TEST_P(SimdAccuracy, LongContractionsAreCutAndFolded) {
  for (Op op : kOps) {
    for (DType dtype : kDTypes) {
      for (std::int64_t rows : {2, 9}) {
        CaseShape shape;
        shape.op = op;
        shape.dtype = dtype;
        shape.out_dtype = DType::kFloat32;
        shape.n = op == Op::kDx ? 5003 : 9;
        shape.k = op == Op::kForward ? 5003 : 70;
        shape.sizes = {op == Op::kDw ? 1200 * rows + 1 : rows};
        shape.multiply = dtype == DType::kBFloat16 && op == Op::kDw;
        shape.permutation = shape.multiply ? Permutation::kY : Permutation::kNone;
        shape.gap = 1;
        expect_matches_reference(Case(shape), "long");
      }
    }
  }
}

TEST_P(SimdAccuracy, LargeEnoughForSeveralBlocks) {
  // The plain loops take as long as all kernels do: once for every instruction set of a process.
  static std::map<std::pair<Op, DType>, std::vector<float>> expected;
  for (Op op : kOps) {
    for (DType dtype : kDTypes) {
      CaseShape shape;
      shape.op = op;
      shape.dtype = dtype;
      shape.out_dtype = dtype;
      shape.n = 300;
      shape.k = 520;
      shape.sizes = {0, 700, 3, 90};
      const Case c(shape);
      const auto [known, added] = expected.try_emplace({op, dtype});
      if (added) known->second = c.reference();
      expect_matches(c, known->second, "blocks");
    }
  }
}

TEST_P(SimdAccuracy, NanStaysInItsRowAndSegment) {
  for (Op op : kOps) {
    for (DType dtype : kDTypes) {
      CaseShape shape;
      shape.op = op;
      shape.dtype = dtype;
      shape.out_dtype = dtype;
      shape.n = 35;
      shape.k = 33;
      shape.sizes = {3, 5, 2};
      shape.spare_rows = 3;
      Case c(shape);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      // Rows of the middle segment and those that belong to nobody.
      for (std::int64_t row : {4, 10, 12}) {
        for (std::int64_t i = 0; i < shape.k; ++i) {
          write_float(c.x().data(), dtype, row * c.x_stride() + i, nan);
        }
        for (std::int64_t i = 0; i < shape.n; ++i) {
          write_float(c.dy().data(), dtype, row * c.dy_stride() + i, nan);
        }
      }
      expect_matches_reference(c, "NaN");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SimdAccuracy, ::testing::ValuesIn(usable_instruction_sets()),
                         [](const auto& each) { return std::string(to_string(each.param)); });

}  // namespace
}  // namespace moegemm::cpu::simd
