#pragma once

#include <cstdint>

namespace moegemm {

/// What a measurement wants of the caches of a device.
struct CacheSizes {
  std::int64_t rotate_bytes = 0;  ///< launches that touch this much in turn find nothing of theirs
  std::int64_t flush_bytes = 0;   ///< overwriting this much evicts the operands of a launch
};

}  // namespace moegemm
