#include "cpu/simd/rows/row_locator.h"

#include "cpu/element_type.h"
#include "cpu/routing_data.h"

namespace moegemm::cpu::simd {

RowLocator::RowLocator(const Problem& problem, const Operands& operands)
    : problem_(problem),
      operands_(operands),
      in_bytes_(size_bytes(problem.dtype)),
      out_bytes_(size_bytes(problem.out_dtype)),
      offsets_(
          segment_offsets(operands.m_sizes, problem.sizes_dtype, problem.experts, problem.rows)) {
  if (problem.scatters()) find_owners();
}

/// Two positions that name the same flat row would race: the later one owns it. One pass over the
/// indices, about a nanosecond per row, where a row costs microseconds of arithmetic.
void RowLocator::find_owners() {
  owners_.assign(problem_.flat_rows(), -1);
  for (std::int64_t position = 0; position < end(); ++position) {
    const std::int64_t flat = read_index(operands_.gather_indices, problem_.index_dtype, position);
    if (flat >= 0 && flat < problem_.flat_rows()) owners_[flat] = position;
  }
  for (std::int64_t flat = 0; flat < problem_.flat_rows(); ++flat) {
    if (owners_[flat] < 0) unwritten_.push_back(flat);
  }
}

RowLocator::Row RowLocator::locate(std::int64_t position) const {
  std::int64_t flat = position;
  bool valid = true;
  if (problem_.permutation != Permutation::kNone) {
    flat = read_index(operands_.gather_indices, problem_.index_dtype, position);
    valid = flat >= 0 && flat < problem_.flat_rows();
  }
  Row row;
  if (problem_.op != Op::kDw) {
    const std::int64_t out_row = problem_.scatters() ? flat : position;
    const bool stored = !problem_.scatters() || (valid && owners_[flat] == position);
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
    row.scale = read_float(operands_.router_weights, problem_.weights_dtype, flat);
  }
  return row;
}

std::int64_t RowLocator::unwritten_rows() const {
  return problem_.scatters() ? static_cast<std::int64_t>(unwritten_.size()) : problem_.rows - end();
}

char* RowLocator::unwritten_row(std::int64_t i) const {
  const std::int64_t row = problem_.scatters() ? unwritten_[i] : end() + i;
  return static_cast<char*>(operands_.out) + row * operands_.out_stride * out_bytes_;
}

}  // namespace moegemm::cpu::simd
