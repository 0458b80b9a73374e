#pragma once

namespace moegemm::cuda {

/// Shared by the blocks of one launch. Both are zero between launches: the last block to leave
/// resets them.
struct TileCounter {
  unsigned next;
  unsigned finished;
};

}  // namespace moegemm::cuda
