#include "cpu/simd/rows/row_locator.h"

#include <algorithm>

#include "cpu/element_type.h"

namespace moegemm::cpu::simd {

RowLocator::RowLocator(const Problem& problem, const Operands& operands)
    : problem_(problem),
      operands_(operands),
      in_bytes_(size_bytes(problem.dtype)),
      out_bytes_(size_bytes(problem.out_dtype)),
      segments_(segments_of(segments_view(problem, operands), problem.rows)) {
  if (problem.op == Op::kDw) return;
  if (problem.scatters() || !segments_.disjoint) {
    find_owners();
  } else if (problem.tails == Tails::kZero) {
    for (const SegmentList::Segment& gap : segments_.gaps) {
      for (std::int64_t row = gap.begin; row < gap.end; ++row) unwritten_.push_back(row);
    }
  }
}

std::int64_t RowLocator::cost() const {
  return rows() + 6 * std::ranges::count_if(segments_.segments, [](const SegmentList::Segment& s) {
                    return s.size() > 0;
                  });
}

/// -1: none.
std::int64_t RowLocator::output_row(std::int64_t position) const {
  if (!problem_.scatters()) return position;
  const std::int64_t flat = read_index(operands_.gather_indices, problem_.index_dtype, position);
  return flat >= 0 && flat < problem_.flat_rows() ? flat : -1;
}

/// Two that store the same row would race: the later one owns it. One pass over the rows, about a
/// nanosecond for each, where a row costs microseconds of arithmetic.
void RowLocator::find_owners() {
  owners_.assign(problem_.output_rows(), -1);
  for (std::int64_t e = 0; e < problem_.experts; ++e) {
    for (std::int64_t position = segments_[e].begin; position < segments_[e].end; ++position) {
      const std::int64_t row = output_row(position);
      if (row >= 0) owners_[row] = owner_id(e, position);
    }
  }
  if (problem_.tails == Tails::kUndefined) return;
  for (std::int64_t row = 0; row < problem_.output_rows(); ++row) {
    if (owners_[row] < 0) unwritten_.push_back(row);
  }
}

RowLocator::Row RowLocator::locate(std::int64_t expert, std::int64_t position) const {
  std::int64_t flat = position;
  bool valid = true;
  if (problem_.permutation != Permutation::kNone) {
    flat = read_index(operands_.gather_indices, problem_.index_dtype, position);
    valid = flat >= 0 && flat < problem_.flat_rows();
  }
  Row row;
  if (problem_.op != Op::kDw) {
    const std::int64_t out_row = problem_.scatters() ? flat : position;
    const bool stored = owners_.empty() || ((valid || !problem_.scatters()) &&
                                            owners_[out_row] == owner_id(expert, position));
    if (stored) {
      row.destination =
          static_cast<char*>(operands_.out) + out_row * operands_.out_stride * out_bytes_;
    }
  }
  if (!valid) return row;
  const std::int64_t read = problem_.gathers() ? flat / problem_.gather_divisor() : position;
  const auto row_of = [this](const void* base, std::int64_t index, std::int64_t stride) {
    return static_cast<const char*>(base) + index * stride * in_bytes_;
  };
  if (problem_.op == Op::kDx) {
    row.source = row_of(operands_.dy, read, operands_.dy_stride);
  } else {
    row.source = row_of(operands_.x, problem_.gathers_x() ? read : position, operands_.x_stride);
  }
  if (problem_.op == Op::kDw) {
    row.dy = row_of(operands_.dy, problem_.gathers_dy() ? read : position, operands_.dy_stride);
  }
  if (problem_.multiply) {
    row.router_weight = read_float(operands_.router_weights, problem_.weights_dtype, flat);
  }
  return row;
}

std::int64_t RowLocator::unwritten_rows() const {
  return static_cast<std::int64_t>(unwritten_.size());
}

char* RowLocator::unwritten_row(std::int64_t i) const {
  return static_cast<char*>(operands_.out) + unwritten_[i] * operands_.out_stride * out_bytes_;
}

}  // namespace moegemm::cpu::simd
