#pragma once

#include <algorithm>
#include <cstdint>

#include "moegemm/ops.h"

namespace moegemm::cpu {

inline Executor& executor_of(const ExecutionContext& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

/// Calls body(begin, end) over [0, count) in one contiguous range per worker, of at least `grain`
/// items each.
template <typename Body>
void for_each_range(const ExecutionContext& context, std::int64_t count, std::int64_t grain,
                    const Body& body) {
  if (count <= 0) return;
  const std::int64_t most = (count + grain - 1) / grain;
  // Do not even start the threads for work that one of them should do.
  const std::int64_t workers =
      most == 1 ? 1 : std::min<std::int64_t>(executor_of(context).concurrency(), most);
  if (workers == 1) return body(std::int64_t{0}, count);
  executor_of(context).run(static_cast<int>(workers), [&](int worker) {
    body(count * worker / workers, count * (worker + 1) / workers);
  });
}

}  // namespace moegemm::cpu
