#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

struct RouteCase {
  std::string name;
  std::int64_t tokens = 0;
  std::int64_t topk = 1;
  std::int64_t experts = 1;
  enum class Ids {
    kUniform,
    kSomeInvalid,
    kAllInvalid,
    kOneExpert,
    kDescending
  } ids = Ids::kUniform;
  std::int64_t padding = 0;  ///< between the rows of expert_ids; holds ids that would count
  bool with_inverse = true;
};

std::vector<RouteCase> route_cases() {
  using Ids = RouteCase::Ids;
  std::vector<RouteCase> cases = {
      {"NoTokens", 0, 4, 8},
      {"OneTokenOneExpert", 1, 1, 1},
      {"OneTokenManyExperts", 1, 8, 1024},
      {"AllInvalid", 50, 3, 8, Ids::kAllInvalid},
      {"SomeInvalid", 333, 4, 16, Ids::kSomeInvalid},
      {"OneHotExpert", 1000, 2, 64, Ids::kOneExpert},
      {"Descending", 257, 1, 257, Ids::kDescending},
      {"StridedIds", 100, 3, 7, Ids::kUniform, 5},
      {"StridedIdsSomeInvalid", 77, 2, 5, Ids::kSomeInvalid, 1},
      {"WithoutInverse", 100, 4, 32, Ids::kUniform, 0, false},
      // Up to 128 rows and 1024 experts have a kernel of their own.
      {"FewStridedIds", 20, 3, 7, Ids::kSomeInvalid, 5},
      {"FewWithoutInverse", 30, 4, 32, Ids::kUniform, 0, false},
      {"FewDescending", 100, 1, 100, Ids::kDescending},
      {"FewOfManyExperts", 16, 8, 1024, Ids::kSomeInvalid},
      {"FewOfMoreExperts", 16, 8, 1025, Ids::kSomeInvalid},
      {"OddExpertCount", 999, 3, 129, Ids::kSomeInvalid},
      {"ThousandExperts", 3000, 8, 1024, Ids::kSomeInvalid},
      // Their counts fill a block's shared memory, and no longer fit it, in one block and in many.
      {"FourThousandExperts", 3000, 4, 4000, Ids::kSomeInvalid},
      {"FiveThousandExpertsFewTokens", 513, 4, 5000, Ids::kSomeInvalid},
      {"SeventyThousandExperts", 20'001, 6, 70'000, Ids::kSomeInvalid},
      {"Layer8192x8Over128", 8192, 8, 128},
      {"Layer8192x10Over512", 8192, 10, 512, Ids::kSomeInvalid},
  };
  for (std::int64_t topk = 1; topk <= 10; ++topk) {
    cases.push_back({"Topk" + std::to_string(topk), 61, topk, 12, Ids::kSomeInvalid});
  }
  for (const std::int64_t tokens : {2, 31, 32, 33, 63, 127, 128, 129, 255, 256, 511, 1023, 1025}) {
    cases.push_back({"Tokens" + std::to_string(tokens), tokens, 1, 9, Ids::kSomeInvalid});
  }
  cases.push_back({"HundredThousandTokens", 100'000, 8, 256});
  return cases;
}

std::int64_t choose_id(const RouteCase& c, DType dtype, std::int64_t flat, Random& random) {
  using Ids = RouteCase::Ids;
  const std::int64_t two32 = std::int64_t{1} << 32;
  const std::int64_t narrow[] = {-1,
                                 c.experts,
                                 -c.experts,
                                 std::numeric_limits<std::int32_t>::max(),
                                 std::numeric_limits<std::int32_t>::min(),
                                 c.experts + 1};
  const std::int64_t wide[] = {two32,
                               -two32,
                               two32 + c.experts - 1,
                               std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min(),
                               -two32 + 1};
  const auto invalid = [&] {
    return dtype == DType::kInt64 && random.chance(2) ? wide[random.below(6)]
                                                      : narrow[random.below(6)];
  };
  switch (c.ids) {
    case Ids::kSomeInvalid:
      return random.chance(4) ? invalid() : random.below(c.experts);
    case Ids::kAllInvalid:
      return invalid();
    case Ids::kOneExpert:
      return c.experts / 2;
    case Ids::kDescending:
      return c.experts - 1 - flat % c.experts;
    case Ids::kUniform:
      break;
  }
  return random.below(c.experts);
}

struct Routed {
  std::vector<std::int64_t> m_sizes, gather_indices, inverse;
};

/// The definition: experts in order, each with its rows in flat order, then the rest.
Routed expected_routing(const std::vector<std::int64_t>& ids, std::int64_t experts) {
  const auto valid = [&](std::int64_t id) { return id >= 0 && id < experts; };
  std::vector<std::vector<std::int64_t>> rows_of(experts + 1);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    rows_of[valid(ids[i]) ? ids[i] : experts].push_back(static_cast<std::int64_t>(i));
  }
  Routed routed;
  routed.inverse.resize(ids.size());
  for (std::int64_t e = 0; e <= experts; ++e) {
    if (e < experts) routed.m_sizes.push_back(static_cast<std::int64_t>(rows_of[e].size()));
    for (const std::int64_t row : rows_of[e]) {
      routed.inverse[row] = static_cast<std::int64_t>(routed.gather_indices.size());
      routed.gather_indices.push_back(row);
    }
  }
  return routed;
}

std::vector<std::int64_t> choose_ids(const RouteCase& c, DType dtype, Random& random) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < c.tokens * c.topk; ++i) {
    ids.push_back(choose_id(c, dtype, i, random));
  }
  return ids;
}

/// Ids as memory has them, with padding between the tokens.
std::vector<std::int64_t> in_rows(const RouteCase& c, const std::vector<std::int64_t>& ids) {
  const std::int64_t stride = c.topk + c.padding;
  std::vector<std::int64_t> stored(c.tokens > 0 ? (c.tokens - 1) * stride + c.topk : 0, 0);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    stored[i / c.topk * stride + i % c.topk] = ids[i];
  }
  return stored;
}

TensorView ids_of(const RouteCase& c, const DeviceVector& stored) {
  const TensorView& view = stored.view();
  return TensorView::matrix(view.data, view.dtype, c.tokens, c.topk, c.topk + c.padding,
                            view.device);
}

void expect_route(const RowTarget& target, const RouteCase& c, DType ids_dtype, DType out_dtype) {
  Memory& memory = *target.memory;
  Random random(seed_from(c.name) + run_seed());
  const std::int64_t rows = c.tokens * c.topk;
  const std::vector<std::int64_t> ids = choose_ids(c, ids_dtype, random);
  const DeviceVector device_ids(memory, ids_dtype, in_rows(c, ids));
  const TensorView ids_view = ids_of(c, device_ids);
  const DeviceVector m_sizes(memory, out_dtype, c.experts);
  const DeviceVector indices(memory, out_dtype, rows);
  const DeviceVector inverse(memory, out_dtype, rows);
  const Routed want = expected_routing(ids, c.experts);
  // Poisoned, and then used as the first call left it: any contents must do.
  const DeviceVector workspace(memory, DType::kInt32,
                               (route_workspace_bytes(rows, c.experts, memory.device()) + 3) / 4);
  for (int repeat = 0; repeat < 2; ++repeat) {
    route(ids_view, c.experts, m_sizes.view(), indices.view(),
          c.with_inverse ? inverse.view() : TensorView{}, workspace.view().data, memory.context());
    memory.synchronize();
    EXPECT_EQ(m_sizes.integers(), want.m_sizes);
    EXPECT_EQ(indices.integers(), want.gather_indices);
    if (c.with_inverse) {
      EXPECT_EQ(inverse.integers(), want.inverse);
    }
  }
  EXPECT_TRUE(m_sizes.guards_intact() && indices.guards_intact() && inverse.guards_intact() &&
              workspace.guards_intact());
}

/// What a capacity leaves of a routing.
struct Compact {
  std::vector<std::int64_t> m_sizes, gather_indices, positions;
  bool overflow = false;
};

Compact expected_compact(std::vector<std::int64_t> ids, std::int64_t experts, std::int64_t counted,
                         std::int64_t capacity) {
  for (std::size_t i = counted; i < ids.size(); ++i) ids[i] = -1;
  const Routed all = expected_routing(ids, experts);
  const std::int64_t routed =
      std::accumulate(all.m_sizes.begin(), all.m_sizes.end(), std::int64_t{0});
  const std::int64_t end = std::min(routed, capacity);
  Compact compact;
  std::int64_t begin = 0;
  for (const std::int64_t size : all.m_sizes) {
    compact.m_sizes.push_back(std::clamp<std::int64_t>(end - begin, 0, size));
    begin += size;
  }
  compact.gather_indices.assign(all.gather_indices.begin(), all.gather_indices.begin() + end);
  compact.gather_indices.resize(capacity, -1);
  for (const std::int64_t position : all.inverse) {
    compact.positions.push_back(position < end ? position : -1);
  }
  compact.overflow = routed > capacity;
  return compact;
}

/// Eight rounds over one case: capacities that fit, are too large, too small and nothing, with all
/// tokens and with some.
void expect_compact_route(const RowTarget& target, const RouteCase& c, DType ids_dtype,
                          DType out_dtype) {
  Memory& memory = *target.memory;
  Random random(seed_from(c.name) + run_seed());
  const std::int64_t slots = c.tokens * c.topk;
  const std::vector<std::int64_t> ids = choose_ids(c, ids_dtype, random);
  const DeviceVector device_ids(memory, ids_dtype, in_rows(c, ids));
  const TensorView ids_view = ids_of(c, device_ids);
  const DeviceVector workspace(memory, DType::kInt32,
                               (route_workspace_bytes(slots, c.experts, memory.device()) + 3) / 4);
  const std::int64_t counts[] = {c.tokens + 5, c.tokens * 2 / 3, -3};
  for (int round = 0; round < 8; ++round) {
    const bool limited = round % 2 == 1;
    const std::int64_t told = counts[random.below(3)];
    const std::int64_t counted = limited ? std::clamp<std::int64_t>(told, 0, c.tokens) : c.tokens;
    const std::int64_t routed =
        std::count_if(ids.begin(), ids.begin() + counted * c.topk,
                      [&](std::int64_t id) { return id >= 0 && id < c.experts; });
    const std::int64_t capacities[] = {routed, 2 * routed + 77, routed / 2, 0};
    const std::int64_t capacity = capacities[round / 2];
    const Compact want = expected_compact(ids, c.experts, counted * c.topk, capacity);
    const DeviceVector m_sizes(memory, out_dtype, c.experts);
    const DeviceVector indices(memory, out_dtype, capacity);
    const DeviceVector positions(memory, out_dtype, slots);
    const DeviceVector num_tokens(memory, ids_dtype, std::vector<std::int64_t>{told});
    const DeviceVector overflow(memory, ids_dtype, std::vector<std::int64_t>{0});
    RouteLimits limits;
    if (limited) limits.num_tokens = num_tokens.view();
    limits.overflow = overflow.view();
    route_compact(
        ids_view, c.experts, m_sizes.view(), indices.view(),
        TensorView::matrix(positions.view().data, out_dtype, c.tokens, c.topk, 0, memory.device()),
        limits, workspace.view().data, memory.context());
    memory.synchronize();
    EXPECT_EQ(m_sizes.integers(), want.m_sizes) << "capacity " << capacity;
    EXPECT_EQ(indices.integers(), want.gather_indices) << "capacity " << capacity;
    EXPECT_EQ(positions.integers(), want.positions) << "capacity " << capacity;
    EXPECT_EQ(overflow.integers(), std::vector<std::int64_t>{want.overflow});
    EXPECT_TRUE(m_sizes.guards_intact() && indices.guards_intact() && positions.guards_intact() &&
                overflow.guards_intact() && workspace.guards_intact());
    limits.check = true;
    const auto again = [&] {
      route_compact(ids_view, c.experts, m_sizes.view(), indices.view(),
                    TensorView::matrix(positions.view().data, out_dtype, c.tokens, c.topk, 0,
                                       memory.device()),
                    limits, workspace.view().data, memory.context());
    };
    if (want.overflow) {
      EXPECT_THROW(again(), Error);
    } else {
      EXPECT_NO_THROW(again());
    }
  }
}

}  // namespace

void add_route_tests() {
  static const std::vector<RouteCase> cases = route_cases();
  constexpr DType kDtypes[] = {DType::kInt32, DType::kInt64};
  for (const RowTarget& target : row_targets()) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const RouteCase& c = cases[i];
      for (std::size_t combination = 0; combination < 4; ++combination) {
        // A trimmed run takes each case once, with the dtypes in turn.
        if (trimmed_run() && (i % 4 != combination || c.tokens > 3000)) continue;
        const DType ids = kDtypes[combination / 2];
        const DType out = kDtypes[combination % 2];
        add_test(target.name + "/Route", c.name + "_" + to_string(ids) + "_to_" + to_string(out),
                 [&target, &c, ids, out] { expect_route(target, c, ids, out); });
        add_test(target.name + "/CompactRoute",
                 c.name + "_" + to_string(ids) + "_to_" + to_string(out),
                 [&target, &c, ids, out] { expect_compact_route(target, c, ids, out); });
      }
    }
  }
}

}  // namespace moegemm::testing
