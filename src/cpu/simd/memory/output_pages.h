#pragma once

#include <cstdint>

#include "moegemm/ops.h"

namespace moegemm::cpu::simd {

/// Puts pages under a large output that is about to be written for the first time: the first touch
/// of a fresh 42 MiB buffer takes 22 ms in 4 KiB pages and 5 ms in 2 MiB ones, often more than the
/// arithmetic. So 2 MiB pages, unless the last ones took longer than small ones do.
/// Every worker touches pages of its own: two that meet in a fresh page would both clear 2 MiB, and
/// one of them in vain. Only whole huge pages inside the buffer are concerned; no byte changes, and
/// advice that the system does not take changes nothing.
void prepare_output_pages(void* data, std::int64_t bytes, const ExecutionContext& context);

}  // namespace moegemm::cpu::simd
