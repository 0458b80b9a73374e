#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

/// X gathered and dX scattered, or with `per_token` dY gathered.
ProblemCase capacity(std::string name, bool per_token, std::int64_t rows, std::int64_t slots) {
  ProblemCase c;
  c.name = std::move(name) + (per_token ? "_dy_per_token" : "_permute_x");
  c.m_sizes = {20, 0, 33, 7, 0, 40};
  c.rows = rows;
  c.slots = slots;
  c.topk = 4;
  c.permutation = per_token ? Permutation::kY : Permutation::kX;
  c.dy_per_token = per_token;
  return c;
}

}  // namespace

std::vector<ProblemCase> capacity_cases() {
  std::vector<ProblemCase> cases;
  for (const bool per_token : {false, true}) {
    const auto add = [&](const char* name, std::int64_t rows, std::int64_t slots) {
      return &cases.emplace_back(capacity(name, per_token, rows, slots));
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
    // So wide beside the permuted operand that dW may copy that into order first.
    ProblemCase* wide = add("CapacityOfAWideDw", 100, 400);
    wide->n = per_token ? 64 : 4096;
    wide->k = per_token ? 4096 : 64;
    if (per_token) {
      add("CapacityMultiplied", 150, 800)->multiply = true;
      add("MoreRowsThanSlotsMultiplied", 200, 80)->multiply = true;
    }
    ProblemCase* activated = add("CapacityWithBiasAndActivation", 150, 400);
    activated->bias = true;
    activated->activation = Activation{};
    activated->product_scale = 0.25f;
  }
  return cases;
}

}  // namespace moegemm::testing
