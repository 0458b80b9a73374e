#pragma once

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "cpu/routing_data.h"

namespace moegemm::cpu::simd {

/// Finds the memory of the row at an expert-ordered position, by the rules for bad indices: a row
/// whose index is out of range reads as zeros and is not stored.
class RowLocator {
 public:
  RowLocator(const Problem& problem, const Operands& operands);

  std::int64_t begin(std::int64_t expert) const { return segments_[expert].begin; }
  std::int64_t size(std::int64_t expert) const { return segments_[expert].size(); }
  /// In all segments together.
  std::int64_t rows() const { return segments_.routed; }
  /// Of a row GEMM, in rows of arithmetic: a block of few rows still costs the reading of its
  /// weights, about six of them.
  std::int64_t cost() const;

  struct Row {
    const char* source = nullptr;  ///< X (forward, dW) or dY (dX); null: zeros
    const char* dy = nullptr;      ///< dW only
    char* destination = nullptr;   ///< Y or dX; null: not stored
    float router_weight = 1;
  };
  /// `position` is in the expert's segment.
  Row locate(std::int64_t expert, std::int64_t position) const;

  /// Rows of Y or dX that no valid position inside a segment stores: they are to be zeroed.
  std::int64_t unwritten_rows() const;
  char* unwritten_row(std::int64_t i) const;

 private:
  std::int64_t output_row(std::int64_t position) const;
  std::int64_t owner_id(std::int64_t expert, std::int64_t position) const {
    return expert * problem_.rows + position;
  }
  void find_owners();

  const Problem& problem_;
  const Operands& operands_;
  std::int64_t in_bytes_;
  std::int64_t out_bytes_;
  SegmentList segments_;
  /// Where two may store one row: scattered outputs and segments that overlap. Who stores row i.
  std::vector<std::int64_t> owners_;
  std::vector<std::int64_t> unwritten_;  ///< output rows that nobody stores
};

}  // namespace moegemm::cpu::simd
