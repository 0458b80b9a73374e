#pragma once

namespace moegemm::cuda {

/// Where the blocks of one launch draw their tiles from. Zero before a launch; the last block to
/// finish (`finished` counts them) sets both back to zero, so nothing is cleared between launches.
struct TileCounter {
  unsigned next;
  unsigned finished;
};

}  // namespace moegemm::cuda
