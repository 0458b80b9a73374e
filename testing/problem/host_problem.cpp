#include "testing/problem/host_problem.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace moegemm::testing {
namespace {

std::vector<std::int64_t> random_permutation(std::int64_t count, Random& random) {
  std::vector<std::int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t i = count - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
  return order;
}

/// Segments that starts or ends place, as far as they lie inside the rows.
void place_segments(HostProblem& p) {
  const std::vector<std::int64_t>& told = p.spec.m_sizes;
  p.sizes.clear();
  p.begins.clear();
  p.owners.assign(p.spec.rows, -1);
  std::int64_t routed = 0;
  for (std::int64_t e = 0; e < p.spec.experts(); ++e) {
    const std::int64_t start = !p.spec.ends ? p.spec.starts[e] : e == 0 ? 0 : told[e - 1];
    const std::int64_t end =
        p.spec.ends ? told[e] : start + std::clamp<std::int64_t>(told[e], 0, std::int64_t{1} << 40);
    const std::int64_t begin = std::clamp<std::int64_t>(start, 0, p.spec.rows);
    p.begins.push_back(begin);
    p.sizes.push_back(std::clamp<std::int64_t>(end, begin, p.spec.rows) - begin);
    for (std::int64_t i = 0; i < p.sizes[e]; ++i) p.owners[begin + i] = e;
    routed += p.sizes[e];
  }
  p.begins.push_back(routed);
}

void lay_out_segments(HostProblem& p) {
  if (p.spec.ends || !p.spec.starts.empty()) return place_segments(p);
  p.sizes = clipped_sizes(p.spec.m_sizes, p.spec.rows);
  p.begins.assign(1, 0);
  p.owners.assign(p.spec.rows, -1);
  for (std::int64_t e = 0; e < p.spec.experts(); ++e) {
    for (std::int64_t i = 0; i < p.sizes[e]; ++i) p.owners[p.begins[e] + i] = e;
    p.begins.push_back(p.begins[e] + p.sizes[e]);
  }
}

/// Bad entries are spread over all positions: inside segments, at their ends and past them.
void choose_indices(HostProblem& p, Random& random) {
  p.gather_indices = random_permutation(p.spec.flat_rows(), random);
  p.gather_indices.resize(p.spec.rows, -1);
  const std::vector<std::int64_t> where = random_permutation(p.spec.rows, random);
  for (std::size_t i = 0; i < p.spec.bad_indices.size() && i < where.size(); ++i) {
    p.gather_indices[where[i]] = p.spec.bad_indices[i];
  }
  const std::int64_t routed = p.begins.back();
  for (std::int64_t i = 0; i < p.spec.repeated_indices && routed > 0; ++i) {
    p.gather_indices[random.below(routed)] = p.gather_indices[random.below(routed)];
  }
  for (std::int64_t r = 0; p.spec.tail_index && r < p.spec.rows; ++r) {
    if (p.owners[r] < 0) p.gather_indices[r] = *p.spec.tail_index;
  }
  p.positions_of.assign(p.spec.flat_rows(), {});
  for (std::int64_t r = 0; r < p.spec.rows; ++r) {
    if (p.owners[r] >= 0 && p.index_valid(r)) p.positions_of[p.gather_indices[r]].push_back(r);
  }
}

void choose_weights(HostProblem& p, Random& random) {
  p.router_weights.resize(p.spec.flat_rows());
  for (float& weight : p.router_weights) weight = round_to(p.weights_dtype, random.symmetric());
}

/// Whole rows of NaN, and single infinities of either sign, in turn.
void spoil_row(HostMatrix& matrix, std::int64_t row, int kind) {
  if (row < 0 || matrix.cols == 0) return;
  if (kind % 3 == 0) {
    for (std::int64_t c = 0; c < matrix.cols; ++c) matrix.set(row, c, kNan);
  } else {
    matrix.set(row, matrix.cols / 2, kind % 3 == 1 ? kInf : -kInf);
  }
}

void spoil(HostProblem& p) {
  std::vector<std::int64_t> positions = p.spec.bad_rows;
  if (p.spec.bad_tail) {
    for (std::int64_t r = 0; r < p.spec.rows; ++r) {
      if (p.owners[r] < 0) positions.push_back(r);
    }
  }
  for (std::int64_t r = 0; p.spec.bad_absent_rows && r < p.spec.rows; ++r) {
    if (p.owners[r] >= 0 && !p.index_valid(r)) positions.push_back(r);
  }
  int kind = 0;
  for (const std::int64_t r : positions) {
    if (!p.x.values.empty()) spoil_row(p.x, p.x_row(r), kind);
    if (!p.dy.values.empty()) spoil_row(p.dy, p.dy_row(r), kind);
    if (!p.low_rows.values.empty()) spoil_row(p.low_rows, r, kind);
    ++kind;
  }
  for (const std::int64_t e : p.spec.bad_experts) {
    if (p.w.values.empty() || p.spec.quantised()) break;
    for (std::int64_t n = 0; n < p.spec.n; ++n) spoil_row(p.w, e * p.spec.n + n, 0);
  }
  if (p.spec.bad_tail_weights) {
    for (std::int64_t r = p.begins.back(); r < p.spec.rows; ++r) {
      if (p.index_valid(r)) p.router_weights[p.gather_indices[r]] = kNan;
    }
  }
}

/// W is what the packed weights decode to, rounded once.
void decode_weights(HostProblem& p) {
  const std::int64_t n = p.spec.n;
  for (std::int64_t row = 0; row < p.w.rows; ++row) {
    const std::vector<float> decoded = p.packed_w.row(row / n, row % n);
    for (std::int64_t c = 0; c < p.w.cols; ++c) p.w.set(row, c, decoded[c]);
  }
}

void choose_quantised_weights(HostProblem& p, Random& random) {
  const ProblemCase& spec = p.spec;
  p.packed_w = random_weights(parse_quantization(spec.weights, spec.scale_type, spec.n, spec.k),
                              spec.experts(), spec.n, spec.k, spec.product_scale,
                              spec.extreme_scales, random);
  p.w = poisoned_matrix(p.dtype, spec.experts() * spec.n, spec.k, 0, spec.base_offset);
  for (const std::int64_t e : spec.bad_experts) {
    const std::int64_t each = p.packed_w.scale_count() / spec.experts();
    for (std::int64_t i = 0; i < each; ++i) p.packed_w.set_scale(e * each + i, kNan);
  }
  decode_weights(p);
}

}  // namespace

void HostMatrix::set(std::int64_t r, std::int64_t c, float value) {
  encode(dtype, bytes.data(), position(r, c), value);
  values[r * cols + c] = decode(dtype, bytes.data(), position(r, c));
}

HostMatrix poisoned_matrix(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t padding,
                           std::int64_t offset) {
  HostMatrix m{.dtype = dtype,
               .rows = rows,
               .cols = cols,
               .stride = cols + padding,
               .offset = offset,
               .bytes = {},
               .values = {}};
  if (rows * cols == 0) return m;
  m.bytes.assign((m.position(rows - 1, cols - 1) + 1) * size_bytes(dtype), kPoisonByte);
  m.values.assign(rows * cols, kNan);
  return m;
}

HostMatrix random_matrix(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t padding,
                         std::int64_t offset, Random& random) {
  HostMatrix m = poisoned_matrix(dtype, rows, cols, padding, offset);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) m.set(r, c, random.symmetric());
  }
  return m;
}

std::int64_t HostProblem::x_row(std::int64_t position) const {
  if (spec.permutation != Permutation::kX) return position;
  return index_valid(position) ? gather_indices[position] / spec.topk : -1;
}

std::int64_t HostProblem::dy_row(std::int64_t position) const {
  if (spec.permutation != Permutation::kY) return position;
  if (!index_valid(position)) return -1;
  return spec.dy_per_token ? gather_indices[position] / spec.topk : gather_indices[position];
}

HostProblem build_problem(const ProblemCase& spec, Op op, DType dtype, std::uint64_t seed) {
  Random random(seed);
  HostProblem p;
  p.spec = spec;
  p.op = op;
  p.dtype = dtype;
  p.out_dtype = spec.output_in_fp32 || spec.accumulate ? DType::kFloat32 : dtype;
  p.weights_dtype = spec.weights_in_fp32 ? DType::kFloat32 : dtype;
  lay_out_segments(p);
  choose_indices(p, random);

  const std::int64_t x_rows = spec.permutation == Permutation::kX ? spec.tokens() : spec.rows;
  const std::int64_t w_rows = spec.experts() * spec.n;
  const std::int64_t offset = spec.base_offset;
  if (op != Op::kDx) p.x = random_matrix(dtype, x_rows, spec.k, spec.x_padding, offset, random);
  if (spec.quantised()) {
    choose_quantised_weights(p, random);
  } else if (op != Op::kDw) {
    p.w = random_matrix(dtype, w_rows, spec.k, spec.w_padding, offset, random);
  }
  if (op != Op::kForward) {
    const std::int64_t dy_rows = spec.dy_per_token ? spec.tokens() : spec.rows;
    p.dy = random_matrix(dtype, dy_rows, spec.n, spec.dy_padding, offset, random);
  }
  choose_weights(p, random);
  const std::int64_t out_rows = op == Op::kDw ? w_rows : spec.output_rows(op);
  const std::int64_t features = spec.features(op);
  const std::int64_t out_cols =
      spec.activation ? spec.activation->activated_columns(features) : features;
  if (spec.bias && op != Op::kDw) {
    p.bias = random_matrix(dtype, spec.experts(), features, spec.w_padding, offset, random);
  }
  if (spec.low_rank > 0) {
    const bool forward = op == Op::kForward;
    p.low_rows = random_matrix(dtype, spec.rows, spec.low_rank, spec.x_padding, offset, random);
    p.low_weights = random_matrix(dtype, spec.experts() * (forward ? spec.n : spec.low_rank),
                                  forward ? spec.low_rank : spec.k, spec.w_padding, offset, random);
  }
  for (std::int64_t r = 0; spec.product_scale != 1 && !spec.quantised() && r < p.w.rows; ++r) {
    for (std::int64_t c = 0; c < p.w.cols; ++c) p.w.set(r, c, spec.product_scale * p.w.row(r)[c]);
  }
  p.out = spec.accumulate
              ? random_matrix(p.out_dtype, out_rows, out_cols, spec.out_padding, offset, random)
              : poisoned_matrix(p.out_dtype, out_rows, out_cols, spec.out_padding, offset);
  spoil(p);
  return p;
}

void reroute(HostProblem& problem, const std::vector<std::int64_t>& m_sizes, std::uint64_t seed) {
  Random random(seed);
  problem.spec.m_sizes = m_sizes;
  lay_out_segments(problem);
  choose_indices(problem, random);
  choose_weights(problem, random);
}

}  // namespace moegemm::testing
