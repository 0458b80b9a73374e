#pragma once

#include <cstdint>
#include <vector>

#include "core/backend.h"

namespace moegemm::cpu::simd {

/// Finds the memory of the row at an expert-ordered position, by the rules for bad indices: a row
/// whose index is out of range reads as zeros and is not stored.
class RowLocator {
 public:
  RowLocator(const Problem& problem, const Operands& operands);

  /// Where the segments begin; ends() is the first position that belongs to nobody.
  std::int64_t begin(std::int64_t expert) const { return offsets_[expert]; }
  std::int64_t size(std::int64_t expert) const { return offsets_[expert + 1] - offsets_[expert]; }
  std::int64_t end() const { return offsets_.back(); }

  struct Row {
    const char* source = nullptr;  ///< X (forward, dW) or dY (dX); null: zeros
    const char* dy = nullptr;      ///< dW only
    char* destination = nullptr;   ///< Y or dX; null: not stored
    float scale = 1;
  };
  Row locate(std::int64_t position) const;

  /// Rows of Y or dX that no valid position inside a segment stores: they are to be zeroed.
  std::int64_t unwritten_rows() const;
  char* unwritten_row(std::int64_t i) const;

 private:
  void find_owners();

  const Problem& problem_;
  const Operands& operands_;
  std::int64_t in_bytes_;
  std::int64_t out_bytes_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t> owners_;     ///< scattered outputs: the position that stores flat row i
  std::vector<std::int64_t> unwritten_;  ///< scattered outputs: flat rows without an owner
};

}  // namespace moegemm::cpu::simd
