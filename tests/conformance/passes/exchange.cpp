#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/driver/targets.h"
#include "conformance/passes/row_checks.h"
#include "conformance/suites.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/random.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {
namespace {

/// Some tokens' copies in a buffer of so many rows, of which the others become zero.
struct SpreadCase {
  std::string name;
  std::int64_t tokens = 21;
  std::int64_t topk = 3;
  std::int64_t rows = 75;
  std::int64_t cols = 64;
  std::int64_t padding = 0;
  std::int64_t offset = 0;  ///< elements before the first row
};

std::vector<SpreadCase> spread_cases() {
  std::vector<SpreadCase> cases = {
      {.name = "Plain"},
      {.name = "NoTokens", .tokens = 0},
      {.name = "NoTokensOneRow", .tokens = 0, .rows = 1},
      {.name = "NoTokensUnaligned", .tokens = 0, .rows = 33, .cols = 7},
      {.name = "OneRow", .tokens = 1, .topk = 1, .rows = 1},
      {.name = "MoreSlotsThanRows", .rows = 40},
      {.name = "Strided", .padding = 8},
      {.name = "OffsetUnaligned", .offset = 1},
      {.name = "WideRows", .tokens = 5, .rows = 17, .cols = 7168},
      {.name = "ManySlots", .tokens = 3, .topk = 40, .rows = 131, .cols = 40},
  };
  for (const std::int64_t rows : {31, 32, 33, 64}) {
    cases.push_back({.name = "Rows" + std::to_string(rows), .tokens = 7, .rows = rows});
  }
  return cases;
}

void expect_spread(const RowTarget& target, const SpreadCase& c, DType dtype) {
  Memory& memory = *target.memory;
  Random random(seed_from(c.name) + run_seed());
  const HostMatrix tokens = random_matrix(dtype, c.tokens, c.cols, c.padding, c.offset, random);
  const std::int64_t slots = c.tokens * c.topk;
  std::vector<std::int64_t> owners(c.rows, -1), positions(slots, -1);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t row = random.below(c.rows);
    if (random.chance(4) || owners[row] >= 0) continue;
    owners[row] = slot;
    positions[slot] = row;
  }
  std::vector<std::int64_t> indices = owners;
  for (std::int64_t& index : indices) {
    if (index < 0 && random.chance(2)) index = slots + random.below(3);  // nobody's either
  }
  const HostMatrix out = poisoned_matrix(dtype, c.rows, c.cols, c.padding, c.offset);
  const DType index_dtype = c.topk % 2 ? DType::kInt32 : DType::kInt64;
  const DeviceMatrix device_tokens(memory, tokens), device_out(memory, out);
  const DeviceVector device_positions(memory, index_dtype, positions);
  const DeviceVector device_indices(memory, index_dtype, indices);
  spread_rows(device_tokens.view(),
              TensorView::matrix(device_positions.view().data, index_dtype, c.tokens, c.topk, 0,
                                 memory.device()),
              device_indices.view(), device_out.view(), memory.context());
  memory.synchronize();
  const std::vector<unsigned char> bytes = device_out.download();
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t col = 0; col < c.cols; ++col) {
      const double want = owners[r] < 0 ? 0.0 : tokens.row(owners[r] / c.topk)[col];
      if (!expect_close(dtype, bytes, out.position(r, col), want, 0.0, {"out", r, col})) return;
    }
  }
  expect_untouched_padding(out, bytes);
  EXPECT_TRUE(device_out.guards_intact());
}

}  // namespace

void add_exchange_tests() {
  static const std::vector<SpreadCase> cases = spread_cases();
  for (const RowTarget& target : row_targets()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const SpreadCase& c : cases) {
        add_test(target.name + "/SpreadRows", c.name + "_" + to_string(dtype),
                 [&target, &c, dtype] { expect_spread(target, c, dtype); });
      }
    }
  }
}

}  // namespace moegemm::testing
