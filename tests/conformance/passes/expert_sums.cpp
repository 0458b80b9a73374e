#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "conformance/passes/row_checks.h"
#include "conformance/suites.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {
namespace {

struct SumCase {
  std::string name;
  std::vector<std::int64_t> m_sizes = {20, 0, 33, 1, 6};
  std::vector<std::int64_t> starts = {};  ///< none: segments follow one another
  std::int64_t rows = 72;
  std::int64_t cols = 64;
  std::int64_t topk = 2;
  std::int64_t slots = -1;  ///< T * topk; -1: as many as rows
  std::int64_t padding = 0;
  bool gathers = false;
  bool weighted = false;
  bool fp32_output = false;
  bool nan_tail = false;
  std::vector<std::int64_t> bad_indices = {};
};

std::vector<SumCase> sum_cases() {
  return {
      {.name = "NoRows", .m_sizes = {0, 0}, .rows = 0},
      {.name = "InOrder"},
      {.name = "InOrderFp32Output", .fp32_output = true},
      {.name = "Gathered", .gathers = true},
      {.name = "GatheredWeighted", .gathers = true, .weighted = true},
      {.name = "InOrderStrided", .padding = 8},
      {.name = "InOrderUnaligned", .cols = 37, .padding = 3, .fp32_output = true},
      {.name = "Strided", .padding = 8, .gathers = true, .weighted = true},
      {.name = "Unaligned", .cols = 37, .padding = 3, .gathers = true, .weighted = true},
      {.name = "OneColumn", .cols = 1},
      {.name = "FewRowsOfManySlots", .slots = 400, .gathers = true, .weighted = true},
      {.name = "MoreRowsThanSlots", .slots = 20, .gathers = true, .weighted = true},
      {.name = "SeveralStrips", .cols = 1000},
      {.name = "LongSegment", .m_sizes = {700, 2}, .rows = 702},
      {.name = "LongSegmentGathered",
       .m_sizes = {3, 1300, 2},
       .rows = 1306,
       .gathers = true,
       .weighted = true,
       .bad_indices = {-1, 5000}},
      {.name = "ManyExperts", .m_sizes = std::vector<std::int64_t>(700, 1), .rows = 720},
      {.name = "SizesExceedRows", .m_sizes = {30, 100, 7}},
      {.name = "NegativeSizes", .m_sizes = {-3, 30, -9, 7}},
      {.name = "IndicesOutOfRange",
       .gathers = true,
       .weighted = true,
       .bad_indices = {-1, 72, 1000, -100, 2147483647}},
      {.name = "NanPastTheSegments", .nan_tail = true},
      {.name = "Gaps", .starts = {50, 3, 8, 71, 0}, .nan_tail = true},
      {.name = "GapsGathered", .starts = {50, 3, 8, 71, 0}, .gathers = true, .weighted = true},
  };
}

/// Its rows in order, with nothing to multiply.
ProblemCase segments_of(const SumCase& c) {
  ProblemCase spec;
  spec.name = c.name;
  spec.m_sizes = c.m_sizes;
  spec.starts = c.starts;
  spec.rows = c.rows;
  spec.n = spec.k = 1;
  return spec;
}

void expect_sums(const RowTarget& target, const SumCase& c, DType dtype) {
  Memory& memory = *target.memory;
  ProblemCase spec = segments_of(c);
  spec.topk = c.topk;
  spec.permutation = Permutation::kY;
  spec.slots = c.slots;
  spec.bad_indices = c.bad_indices;
  const HostProblem p = build_problem(spec, Op::kForward, dtype, seed_from(c.name) + run_seed());
  Random random(seed_from(c.name) + run_seed());
  HostMatrix rows =
      random_matrix(dtype, c.gathers ? spec.tokens() : c.rows, c.cols, c.padding, 0, random);
  for (std::int64_t r = 0; c.nan_tail && r < c.rows; ++r) {
    if (p.owners[r] < 0) rows.set(r, 0, kNan);
  }
  const DType out_dtype = c.fp32_output ? DType::kFloat32 : dtype;
  const HostMatrix blank = poisoned_matrix(out_dtype, spec.experts(), c.cols, c.padding, 0);
  const DeviceMatrix device_rows(memory, rows), sums(memory, blank);
  const DeviceVector sizes(memory, DType::kInt32, c.m_sizes);
  const DeviceVector indices(memory, DType::kInt32, p.gather_indices);
  const DeviceVector weights(memory, DType::kFloat32, p.router_weights);
  const DeviceVector starts(memory, DType::kInt32, c.starts);
  RoutingView routing{sizes.view(), {}, {}, c.topk};
  if (!c.starts.empty()) routing.starts = starts.view();
  if (c.gathers) routing.gather_indices = indices.view();
  if (c.weighted) routing.router_weights = weights.view();
  expert_sums(device_rows.view(), routing, sums.view(), memory.context());
  memory.synchronize();

  const std::vector<unsigned char> bytes = sums.download();
  for (std::int64_t e = 0; e < spec.experts(); ++e) {
    for (std::int64_t col = 0; col < c.cols; ++col) {
      double sum = 0, squares = 0;
      for (std::int64_t r = p.begins[e]; r < p.begins[e] + p.sizes[e]; ++r) {
        if (c.gathers && !p.index_valid(r)) continue;
        const std::int64_t flat = p.gather_indices[r];
        const double weight = c.weighted ? p.router_weights[flat] : 1.0;
        const double term =
            weight * static_cast<double>(rows.row(c.gathers ? flat / c.topk : r)[col]);
        sum += term;
        squares += term * term;
      }
      if (!expect_close(out_dtype, bytes, blank.position(e, col), sum,
                        sum_bound(out_dtype, std::max<std::int64_t>(p.sizes[e], 1), sum, squares),
                        {"sums", e, col})) {
        return;
      }
    }
  }
  expect_untouched_padding(blank, bytes);
  EXPECT_TRUE(sums.guards_intact());
}

/// What is added to rows.
enum class Addend { kWeightedBias, kRows };

/// A case of sums of rows in order, as rows that something is added to. fp32_output: the rows are
/// in fp32, as a product before its rounding.
void expect_added(const RowTarget& target, const SumCase& c, Addend what, Tails tails,
                  DType dtype) {
  Memory& memory = *target.memory;
  const ProblemCase spec = segments_of(c);
  const HostProblem p = build_problem(spec, Op::kForward, dtype, seed_from(c.name) + run_seed());
  Random random(seed_from(c.name) + run_seed());
  const bool by_row = what == Addend::kRows;
  const DType rows_dtype = c.fp32_output || by_row ? DType::kFloat32 : dtype;
  HostMatrix rows = random_matrix(rows_dtype, c.rows, c.cols, c.padding, 0, random);
  const HostMatrix added =
      random_matrix(by_row ? DType::kFloat32 : dtype, by_row ? c.rows : spec.experts(), c.cols,
                    c.padding, 0, random);
  const HostMatrix weights = random_matrix(DType::kFloat32, 1, c.rows, 0, 0, random);
  for (std::int64_t r = 0; c.nan_tail && r < c.rows; ++r) {
    if (p.owners[r] < 0) rows.set(r, 0, kNan);
  }
  const HostMatrix blank = poisoned_matrix(dtype, c.rows, c.cols, c.padding, 0);
  const DeviceMatrix device_rows(memory, rows), device_added(memory, added), out(memory, blank);
  const DeviceMatrix device_weights(memory, weights);
  const DeviceVector sizes(memory, DType::kInt32, c.m_sizes);
  const TensorView of_rows = TensorView::vector(device_weights.view().data, DType::kFloat32, c.rows,
                                                device_weights.view().device);
  const DeviceVector starts(memory, DType::kInt32, c.starts);
  RoutingView routing{sizes.view(), {}, of_rows, 1};
  if (!c.starts.empty()) routing.starts = starts.view();
  routing.tails = tails;
  const bool in_place = rows_dtype == dtype && c.padding > 0;
  const DeviceMatrix& result = in_place ? device_rows : out;
  if (by_row) {
    add_rows(device_rows.view(), device_added.view(), routing, result.view(), memory.context());
  } else {
    add_weighted_bias(device_rows.view(), device_added.view(), routing, result.view(),
                      memory.context());
  }
  memory.synchronize();

  const std::vector<unsigned char> bytes = result.download();
  const std::vector<unsigned char> before = (in_place ? rows : blank).bytes;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t col = 0; col < c.cols; ++col) {
      double want = 0, bound = 0;
      if (p.owners[r] < 0 && tails == Tails::kUndefined) {
        const std::int64_t at = blank.position(r, col) * size_bytes(dtype);
        EXPECT_EQ(std::memcmp(&bytes[at], &before[at], size_bytes(dtype)), 0) << r << ", " << col;
        continue;
      }
      if (p.owners[r] >= 0) {
        const double term = by_row ? static_cast<double>(added.row(r)[col])
                                   : static_cast<double>(weights.row(0)[r]) *
                                         static_cast<double>(added.row(p.owners[r])[col]);
        want = static_cast<double>(rows.row(r)[col]) + term;
        bound = kFp32Roundoff * (std::fabs(want) + 2 * std::fabs(term));
        bound += half_ulp(dtype, std::fabs(want) + bound);
      }
      if (!expect_close(dtype, bytes, blank.position(r, col), want, bound, {"out", r, col})) return;
    }
  }
  expect_untouched_padding(in_place ? rows : blank, bytes);
  EXPECT_TRUE(result.guards_intact());
}

}  // namespace

void add_expert_sum_tests() {
  static const std::vector<SumCase> sums = sum_cases();
  constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (const RowTarget& target : row_targets()) {
    for (int d = 0; d < 3; ++d) {
      const DType dtype = kDtypes[d];
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const SumCase& c = sums[i];
        if (!kept(i, d, c.rows * c.cols)) continue;
        add_test(target.name + "/ExpertSums", c.name + "_" + to_string(dtype),
                 [&target, &c, dtype] { expect_sums(target, c, dtype); });
        if (c.gathers) continue;
        for (const Tails tails : {Tails::kZero, Tails::kUndefined}) {
          const std::string name =
              c.name + (tails == Tails::kZero ? "" : "_tails_left") + "_" + to_string(dtype);
          add_test(target.name + "/WeightedBias", name, [&target, &c, tails, dtype] {
            expect_added(target, c, Addend::kWeightedBias, tails, dtype);
          });
          add_test(target.name + "/AddRows", name, [&target, &c, tails, dtype] {
            expect_added(target, c, Addend::kRows, tails, dtype);
          });
        }
      }
    }
  }
}

}  // namespace moegemm::testing
