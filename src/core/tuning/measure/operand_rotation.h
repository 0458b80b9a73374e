#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "core/tuning/measure/cache_sizes.h"
#include "core/validation/validate.h"
#include "moegemm/tune.h"

namespace moegemm {

/// Copies take this many times `rotate_bytes` at most; a layer of which few experts are in use
/// would take far more to copy than it reads.
constexpr std::int64_t kMostCopied = 4;

/// The operands that timed launches take in turn, so that none finds in a cache what the one before
/// left there: in a model the other layers have been there in between. The first set has the
/// caller's own inputs, the others have copies of them; outputs go to borrowed memory. A call that
/// touches more than the caches hold needs no second set.
class OperandRotation {
 public:
  /// Nothing when there is not even memory for one output and the workspace. Reads m_sizes, which
  /// waits for the device: experts without rows touch no weights. The workspace of the plans is one
  /// for all sets, as it is for the calls of a layer.
  static std::optional<OperandRotation> borrow(const Call& call, std::int64_t workspace_bytes,
                                               const CacheSizes& caches,
                                               const ExecutionContext& context,
                                               TuningSupport& support);

  /// The set of the next launch.
  const Operands& next();

  std::byte* workspace() const { return workspace_; }

  int sets() const { return static_cast<int>(sets_.size()); }
  /// Not null when there is no memory for the copies that it takes: this is to be overwritten
  /// before each launch instead.
  void* flush() const { return flush_; }
  /// All that was borrowed.
  std::int64_t memory_bytes() const { return memory_bytes_; }

 private:
  OperandRotation() = default;

  std::vector<Operands> sets_;
  std::size_t next_ = 0;
  std::byte* workspace_ = nullptr;
  void* flush_ = nullptr;
  std::int64_t memory_bytes_ = 0;
};

}  // namespace moegemm
