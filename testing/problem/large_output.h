#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "testing/device/memory.h"
#include "testing/device/repeated_memory.h"

namespace moegemm::testing {

/// A large matrix that a product writes and of which only some rows are looked at. On the CPU those
/// rows, and guards at both ends, have memory of their own; all others share a few megabytes. A
/// write that misses its place leaves poison where it should have been, as it would in whole
/// memory.
class LargeOutput {
 public:
  LargeOutput(Memory& memory, std::int64_t rows, std::int64_t row_bytes,
              const std::vector<std::int64_t>& looked_at);

  void* data() const { return data_; }
  /// One of the rows that are looked at.
  std::vector<unsigned char> row(std::int64_t row) const;
  bool guards_intact() const;

 private:
  Memory& memory_;
  std::int64_t rows_;
  std::int64_t row_bytes_;
  std::unique_ptr<RepeatedMemory> shared_;
  Buffer whole_;  ///< where nothing is shared
  char* data_ = nullptr;
};

}  // namespace moegemm::testing
