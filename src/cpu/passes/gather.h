#pragma once

#include <cstdint>

#include "core/backend.h"

namespace moegemm::cpu::passes {

/// gathered[r] = rows[gather_indices[r] / divisor], zeros for an index out of range. Arguments are
/// validated by the callers.
void gather_rows(const TensorView& rows, const TensorView& gather_indices, std::int64_t divisor,
                 const TensorView& gathered, const ExecutionContext& context);

}  // namespace moegemm::cpu::passes
