#pragma once

#include <cstdint>

#include "moegemm/passes.h"

namespace moegemm {

/// One or two dimensions of a copy as one: entry i of the inner and o of the outer is
/// number o * inner + i.
struct FactorSide {
  std::int64_t inner = 1;  ///< extents in `to`
  std::int64_t outer = 1;
  std::int64_t given_inner = 1;  ///< extents in `from`: the rest is zero
  std::int64_t given_outer = 1;
  std::int64_t from_inner = 0;  ///< strides
  std::int64_t from_outer = 0;
  std::int64_t to_inner = 0;
  std::int64_t to_outer = 0;
  bool inner_is_expert = false;
  bool outer_is_expert = false;

  std::int64_t extent() const { return inner * outer; }
};

/// A copy as a matrix [lines, columns]: `columns` run along `from`'s memory, `lines` along `to`'s.
/// Where that is one dimension for both, it is `columns`, and `lines` are the two others.
struct FactorTiles {
  FactorSide columns;
  FactorSide lines;
  bool turned = false;  ///< `to` runs along the lines
};

/// Of a copy that is not empty.
FactorTiles factor_tiles(const FactorCopy& copy);

}  // namespace moegemm
