#pragma once

#include <cstdint>

#include "moegemm/ops.h"

namespace moegemm::cpu::simd {

/// Asks for 2 MiB pages under a large output that is about to be written for the first time, and
/// touches them. The first touch of a fresh 42 MiB buffer takes 22 ms in 4 KiB pages and 5 ms in
/// huge ones: often more than the arithmetic. Every worker touches pages of its own: two that meet
/// in a fresh page would both clear 2 MiB, and one of them in vain. Only whole huge pages inside
/// the buffer are concerned; no byte changes, and advice that the system does not take changes
/// nothing.
void prepare_huge_pages(void* data, std::int64_t bytes, const ExecutionContext& context);

}  // namespace moegemm::cpu::simd
