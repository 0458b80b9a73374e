#pragma once

#include <cstdint>

#include "moegemm/export.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Lends a call the memory that it needs besides its operands. The library owns no device memory.
class MOEGEMM_API MemorySupport {
 public:
  virtual ~MemorySupport() = default;

  /// Uninitialised memory on `device`, aligned to 256 bytes, that stays valid until the work which
  /// the call puts on its stream is done. Null when there is none.
  virtual void* allocate(std::int64_t bytes, Device device) = 0;
};

}  // namespace moegemm
