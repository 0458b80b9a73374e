#include <limits>
#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kInt32Min = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kInt64Min = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kTwo32 = std::int64_t{1} << 32;

constexpr Permutation kAll[] = {Permutation::kNone, Permutation::kX, Permutation::kY};
constexpr Permutation kBoth[] = {Permutation::kX, Permutation::kY};

ProblemCase hazard(std::string name, Permutation permutation) {
  ProblemCase c;
  c.name = std::move(name) + "_" + to_string(permutation);
  c.m_sizes = {20, 0, 33, 7, 0, 40};
  c.rows = 100;
  c.topk = permutation == Permutation::kNone ? 1 : 2;
  c.permutation = permutation;
  c.multiply = permutation == Permutation::kY;
  return c;
}

void add_bad_sizes(std::vector<ProblemCase>& cases) {
  const auto add = [&](const std::string& name, std::vector<std::int64_t> sizes, DType dtype) {
    for (const Permutation permutation : kAll) {
      ProblemCase c = hazard(name, permutation);
      c.m_sizes = sizes;
      c.rows = 60;
      c.sizes_dtype = dtype;
      cases.push_back(c);
    }
  };
  for (const DType dtype : {DType::kInt32, DType::kInt64}) {
    const std::string suffix = std::string("_") + to_string(dtype);
    add("SizesFallShort" + suffix, {10, 0, 20}, dtype);
    add("NegativeSizes" + suffix, {-1, 20, -7, 30, kInt32Min, 5, -60}, dtype);
    add("NegativeSizesOnly" + suffix, {-1, -20, kInt32Min}, dtype);
    add("SizesExceedRows" + suffix, {10, 30, 21, 9}, dtype);
    add("FirstSizeExceedsRows" + suffix, {61, 4, 1}, dtype);
    add("EverySizeExceedsRows" + suffix, {100, 100, 100}, dtype);
    // Their sum wraps around in 32 bits: to -4, to 2, and with a negative size to the row count.
    add("SizesWrapAround" + suffix, {3, kInt32Max, kInt32Max, -2, kInt32Max, 4}, dtype);
    add("SizesWrapAroundToFew" + suffix, {kInt32Max, kInt32Max, 4, 10}, dtype);
  }
  add("Sizes64BitWrapAround", {7, kInt64Max, kInt64Max, 4, kInt64Min, 5}, DType::kInt64);
  // The low halves alone would look like valid sizes.
  add("Sizes64BitTruncate", {5, kTwo32 + 10, 20}, DType::kInt64);
  add("Sizes64BitTruncateNegative", {5, -kTwo32 + 10, 20, 3}, DType::kInt64);
}

void add_bad_indices(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : kBoth) {
    // So wide beside the permuted operand that dW may copy that into order first.
    ProblemCase wide = hazard("IndicesOutOfRangeOfAWideDw", permutation);
    (permutation == Permutation::kX ? wide.n : wide.k) = 4104;
    (permutation == Permutation::kX ? wide.k : wide.n) = 72;
    wide.multiply = false;
    wide.bad_indices = {-1, 100, kInt32Max, kInt32Min, 101};
    cases.push_back(wide);
    wide.name = std::string("NanOppositeAbsentRowsOfAWideDw_") + to_string(permutation);
    wide.bad_absent_rows = true;
    cases.push_back(wide);
    // More rows than one block looks after.
    ProblemCase many = hazard("ManyRowsOfWhichSomeAreUnnamed", permutation);
    many.m_sizes = {3000, 0, 9000, 17, 8300};
    many.rows = 20400;
    many.n = many.k = 16;
    many.bad_indices.assign(40, -1);
    many.tail_index = 5;
    cases.push_back(many);
    for (const DType dtype : {DType::kInt32, DType::kInt64}) {
      ProblemCase c = hazard(std::string("IndicesOutOfRange_") + to_string(dtype), permutation);
      c.index_dtype = dtype;
      c.bad_indices = {-1, 100, -100, kInt32Max, kInt32Min, 101, 200, -2, kInt32Max - 99, 1000};
      cases.push_back(c);

      c.name =
          std::string("MostIndicesOutOfRange_") + to_string(dtype) + "_" + to_string(permutation);
      c.bad_indices.clear();
      for (int i = 0; i < 90; ++i) c.bad_indices.push_back(i % 2 == 0 ? 100 + i : -1 - i);
      cases.push_back(c);

      c.name =
          std::string("EveryIndexOutOfRange_") + to_string(dtype) + "_" + to_string(permutation);
      c.bad_indices.assign(100, -1);
      cases.push_back(c);

      // What stands opposite an absent row of dW adds nothing, NaN included; nor does what a row
      // that is not stored would have read.
      c = hazard(std::string("NanOppositeAbsentRows_") + to_string(dtype), permutation);
      c.index_dtype = dtype;
      c.bad_indices = {-1, 100, -100, kInt32Max, kInt32Min, 101, 200, -2, kInt32Max - 99, 1000};
      c.bad_absent_rows = true;
      c.multiply = false;
      cases.push_back(c);

      // Positions past the segments name nothing, whatever their indices are.
      for (const std::int64_t tail : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{59}}) {
        c = hazard(
            "IndexTailOf" + (tail < 0 ? "Minus1" : std::to_string(tail)) + "_" + to_string(dtype),
            permutation);
        c.index_dtype = dtype;
        c.m_sizes = {10, 0, 20, 3};
        c.rows = 100;
        c.tail_index = tail;
        c.bad_tail = true;
        cases.push_back(c);
      }

      c = hazard(std::string("IndicesThatRepeat_") + to_string(dtype), permutation);
      c.index_dtype = dtype;
      c.repeated_indices = 30;
      c.multiply = false;
      cases.push_back(c);

      // NaN in valid rows around rows whose index is bad: those still read as zero.
      c = hazard(std::string("BadIndicesBesideNan_") + to_string(dtype), permutation);
      c.index_dtype = dtype;
      c.bad_indices = {-1, 100, kInt32Max, kInt32Min, -7, 5000, 150, -50};
      c.bad_rows = {0, 5, 19, 20, 30, 52, 53, 59, 60, 99};
      cases.push_back(c);
    }
    // The low halves are valid indices: a kernel that truncates reads or stores a real row.
    ProblemCase c = hazard("Indices64BitTruncate", permutation);
    c.index_dtype = DType::kInt64;
    c.bad_indices = {kTwo32,    kTwo32 + 5, -kTwo32 + 7, 3 * kTwo32 + 60, kInt64Max,
                     kInt64Min, -kTwo32,    kTwo32 - 1,  kInt64Min + 33,  (kTwo32 << 20) + 99};
    cases.push_back(c);
  }
}

void add_nan(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : kAll) {
    ProblemCase c = hazard("NanInNeighbouringSegments", permutation);
    c.topk = 1;                          // so that no other row shares the NaN's token
    c.m_sizes = {20, 1, 33, 7, 15, 24};  // experts 0, 2 and 5 stay clean, or carry it alone
    c.bad_rows = {20, 54, 60, 61, 70, 75};
    cases.push_back(c);

    c = hazard("NanAtSegmentEnds", permutation);
    c.topk = 1;
    c.m_sizes = {17, 18, 19, 20, 21, 5};  // segments end off every tile; 0, 2 and 4 stay clean
    c.bad_rows = {17, 18, 19, 20, 32, 33, 34, 54, 55, 56, 71, 72, 73};
    cases.push_back(c);

    c = hazard("NanPastTheSegments", permutation);
    c.topk = 1;
    c.m_sizes = {20, 0, 13, 8};  // 41 rows of 100
    c.bad_tail = true;
    c.bad_tail_weights = c.multiply;
    cases.push_back(c);

    c.name = std::string("NanPastClippedSegments_") + to_string(permutation);
    c.m_sizes = {20, -4, 30, 1};
    cases.push_back(c);

    c.name = std::string("OnlyNanRowsAndNoSegments_") + to_string(permutation);
    c.m_sizes = {0, 0, -3};
    cases.push_back(c);

    c = hazard("NanInOtherExpertsWeights", permutation);
    c.bad_experts = {0, 1, 3, 4};  // 1 and 4 have no rows
    cases.push_back(c);

    c = hazard("NanInRowsSharedByTokens", permutation);
    c.topk = permutation == Permutation::kNone ? 1 : 4;
    c.bad_rows = {3, 44, 77};
    cases.push_back(c);
  }
  // Long contractions and odd tails, where a kernel pads the last step with its neighbour.
  for (const std::int64_t size : {1, 7, 15, 17, 31, 33, 63, 65, 127, 129}) {
    ProblemCase c = hazard("NanBehindATailOf" + std::to_string(size), Permutation::kNone);
    c.m_sizes = {size, 3, size, 0, size};
    c.rows = 3 * size + 3 + 5;
    c.bad_rows = {size, size + 1, size + 2};  // all of expert 1
    c.bad_tail = true;
    cases.push_back(c);
  }
  // Strided rows carry NaN between them (every input's padding does); here around odd widths.
  for (const Permutation permutation : kAll) {
    ProblemCase c = hazard("NanBetweenOddRows", permutation);
    c.n = 35;
    c.k = 51;
    c.x_padding = c.w_padding = c.dy_padding = 13;
    cases.push_back(c);
    c.name = std::string("NanBetweenAlignedRows_") + to_string(permutation);
    c.n = 72;
    c.k = 40;  // not a multiple of any kernel's step
    c.x_padding = c.w_padding = c.dy_padding = 24;
    cases.push_back(c);
  }
}

}  // namespace

std::vector<ProblemCase> hazard_cases() {
  std::vector<ProblemCase> cases;
  add_bad_sizes(cases);
  add_bad_indices(cases);
  add_nan(cases);
  return cases;
}

}  // namespace moegemm::testing
