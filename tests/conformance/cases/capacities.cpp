#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

enum class Flat { kX, kDyPerToken, kY };

/// X gathered and dX scattered, dY gathered, or Y scattered.
ProblemCase capacity(std::string name, Flat flat, std::int64_t rows, std::int64_t slots) {
  static constexpr const char* kSuffixes[] = {"_permute_x", "_dy_per_token", "_permute_y"};
  ProblemCase c;
  c.name = std::move(name) + kSuffixes[static_cast<int>(flat)];
  c.m_sizes = {20, 0, 33, 7, 0, 40};
  c.rows = rows;
  c.slots = slots;
  c.topk = 4;
  c.permutation = flat == Flat::kX ? Permutation::kX : Permutation::kY;
  c.dy_per_token = flat == Flat::kDyPerToken;
  return c;
}

}  // namespace

std::vector<ProblemCase> capacity_cases() {
  std::vector<ProblemCase> cases;
  for (const Flat flat : {Flat::kX, Flat::kDyPerToken, Flat::kY}) {
    const auto add = [&](const char* name, std::int64_t rows, std::int64_t slots) {
      return &cases.emplace_back(capacity(name, flat, rows, slots));
    };
    add("FewRowsOfManySlots", 100, 800);
    add("CapacityWithATail", 300, 800)->tail_index = -1;
    add("MoreRowsThanSlots", 200, 80);
    add("NoSlots", 100, 0);
    add("NoRowsOfManySlots", 0, 80);
    add("CapacityCutsSegments", 50, 400);
    ProblemCase* bad = add("IndicesAtTheLimitOfSlots", 100, 400);
    bad->bad_indices = {-1, 400, 401, 1 << 30};
    bad->bad_absent_rows = true;
    bad->index_dtype = DType::kInt64;
    ProblemCase* tail = add("NanPastTheSegmentsOfACapacity", 240, 400);
    tail->bad_tail = true;
    tail->tail_index = -1;
    if (flat != Flat::kX) {
      add("CapacityMultiplied", 150, 800)->multiply = true;
      add("MoreRowsThanSlotsMultiplied", 200, 80)->multiply = true;
    }
    if (flat == Flat::kY) {
      add("CapacityWithBias", 150, 400)->bias = true;
      continue;
    }
    // So wide beside the permuted operand that dW may copy that into order first.
    ProblemCase* wide = add("CapacityOfAWideDw", 100, 400);
    wide->n = flat == Flat::kX ? 4096 : 64;
    wide->k = flat == Flat::kX ? 64 : 4096;
    ProblemCase* activated = add("CapacityWithBiasAndActivation", 150, 400);
    activated->bias = true;
    activated->activation = Activation{};
    activated->product_scale = 0.25f;
  }
  return cases;
}

}  // namespace moegemm::testing
