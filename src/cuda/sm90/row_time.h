#pragma once

#include "cuda/host/device_facts.h"
#include "moegemm/info.h"
#include "moegemm/problem.h"

namespace moegemm::cuda::sm90 {

/// What the time of a forward or dX kernel depends on besides its tile; host facts only.
class RowWork {
 public:
  RowWork(const Problem& problem, const DeviceFacts& facts);

  /// Tiles that each multiprocessor gets, on average.
  double waves(const TileShape& tile) const;

  /// Microseconds. Tells how a tile fits the problem: padded columns and rows, a last wave that is
  /// nearly empty, multiprocessors that get no tile. What it does not know (how well L2 keeps the
  /// weights, the order of tiles) decides where there are many waves, and is measured.
  double microseconds(const TileShape& tile) const;

 private:
  /// An expert's tiles over random routing.
  struct RowTiles {
    double count = 0;  ///< per expert
    double rows = 0;   ///< in each, as the tensor cores count them
  };
  RowTiles row_tiles(const TileShape& tile) const;

  Op op_;
  double multiprocessors_;
  double clock_hz_;
  double bytes_per_second_;
  double experts_;        ///< in use
  double rows_;           ///< of each
  double row_deviation_;  ///< standard
  double cols_;
  double depth_;
};

}  // namespace moegemm::cuda::sm90
