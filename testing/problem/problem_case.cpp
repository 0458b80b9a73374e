#include "testing/problem/problem_case.h"

#include <algorithm>
#include <sstream>

namespace moegemm::testing {

std::string to_string(const ProblemCase& c) {
  std::ostringstream out;
  out << c.name << ": E=" << c.experts() << " M=" << c.rows << " N=" << c.n << " K=" << c.k
      << " topk=" << c.topk << ' ' << to_string(c.permutation);
  if (c.slots >= 0) out << " slots=" << c.slots;
  if (!c.starts.empty()) out << " starts";
  if (c.ends) out << " ends";
  if (c.tails == Tails::kUndefined) out << " tails=undefined";
  if (c.multiply) out << " multiply(" << (c.weights_in_fp32 ? "fp32" : "dtype of X") << ')';
  if (c.output_in_fp32) out << " fp32-output";
  if (c.accumulate) out << " accumulate";
  if (c.dy_per_token) out << " dy_per_token";
  if (c.low_rank > 0) out << " low_rank=" << c.low_rank;
  if (c.quantised()) out << " W=" << c.weights << '(' << to_string(c.scale_type) << ')';
  if (c.extreme_scales) out << " extreme scales";
  if (c.bias) out << " bias";
  if (c.tf32) out << " tf32";
  if (c.activation) out << " activation=" << to_string(*c.activation);
  out << " sizes=" << to_string(c.sizes_dtype) << " indices=" << to_string(c.index_dtype);
  if (c.x_padding + c.w_padding + c.dy_padding + c.out_padding > 0) {
    out << " padding(x,w,dy,out)=" << c.x_padding << ',' << c.w_padding << ',' << c.dy_padding
        << ',' << c.out_padding;
  }
  if (c.base_offset > 0) out << " offset=" << c.base_offset;
  if (!c.bad_indices.empty()) out << " bad_indices=" << c.bad_indices.size();
  if (c.repeated_indices > 0) out << " repeated_indices=" << c.repeated_indices;
  out << " m_sizes={";
  for (std::size_t e = 0; e < std::min<std::size_t>(c.m_sizes.size(), 16); ++e) {
    out << (e > 0 ? "," : "") << c.m_sizes[e];
  }
  out << (c.m_sizes.size() > 16 ? ",...}" : "}");
  return out.str();
}

bool applies(const ProblemCase& problem, Op op, DType dtype) {
  if (problem.accumulate) return op == Op::kDw;
  if (problem.quantised() && op == Op::kDw) return false;
  if (problem.dy_per_token && op == Op::kForward) return false;
  if (problem.slots >= 0 && problem.permutation == Permutation::kY && !problem.dy_per_token) {
    if (op != Op::kForward) return false;
  }
  if ((problem.bias || problem.activation || problem.low_rank > 0) && op == Op::kDw) return false;
  if (problem.activation) {
    if (problem.scatters(op) || problem.multiply) return false;
    if (problem.activation->gated() && problem.features(op) % 2 != 0) return false;
  }
  return !(problem.output_in_fp32 && dtype == DType::kFloat32);  // the default already
}

std::vector<std::int64_t> clipped_sizes(const std::vector<std::int64_t>& m_sizes,
                                        std::int64_t rows) {
  std::vector<std::int64_t> sizes;
  std::int64_t left = rows;
  for (const std::int64_t size : m_sizes) {
    sizes.push_back(std::clamp<std::int64_t>(size, 0, left));
    left -= sizes.back();
  }
  return sizes;
}

}  // namespace moegemm::testing
