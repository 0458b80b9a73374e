#pragma once

#include <cstdint>
#include <string>

#include "moegemm/config.h"
#include "moegemm/export.h"
#include "moegemm/problem.h"

namespace moegemm {

enum class PlanSource : std::uint8_t { kHeuristic, kTuned, kManual };

/// A tile of the output and the step of its contraction, in elements.
struct TileShape {
  int rows = 0;   ///< along the segment's rows (forward, dX) or along N (dW)
  int cols = 0;   ///< along N (forward) or K (dX, dW)
  int depth = 0;  ///< contraction step
  bool operator==(const TileShape&) const = default;
};

/// How a problem is run: pure data, printable; a backend turns it into exactly one launch (or one
/// parallel loop over CPU tiles).
struct Plan {
  BackendKind backend = BackendKind::kReference;
  int kernel = 0;           ///< position in the backend's kernel list
  std::string kernel_name;  ///< as listed by kernels()
  TileShape tile;
  int stages = 0;
  int grid = 0;           ///< thread blocks, or CPU workers
  bool composed = false;  ///< the kernel makes the product; its activation is a pass behind it
  /// dW: permuted rows are copied into order by a pass in front, where context.memory can hold
  /// them.
  bool gathers_first = false;
  PlanSource source = PlanSource::kHeuristic;
  std::string note;  ///< for a manual config that was not met exactly: what runs instead
  bool operator==(const Plan&) const = default;
};

MOEGEMM_API const char* to_string(PlanSource source);
MOEGEMM_API std::string to_string(const Plan& plan);
MOEGEMM_API std::size_t hash_value(const Plan& plan);

}  // namespace moegemm

template <>
struct std::hash<moegemm::Plan> {
  std::size_t operator()(const moegemm::Plan& plan) const { return moegemm::hash_value(plan); }
};
