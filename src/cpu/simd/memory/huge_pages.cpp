#include "cpu/simd/memory/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>

#include "cpu/parallel.h"

namespace moegemm::cpu::simd {

void prepare_huge_pages(void* data, std::int64_t bytes, const ExecutionContext& context) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::int64_t kHugePage = 2 * 1024 * 1024;
  // Below this a buffer mostly comes from memory that the process has already touched.
  constexpr std::int64_t kWorthwhileBytes = 2 * kHugePage;
  if (bytes < kWorthwhileBytes) return;
  const std::int64_t begin = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
  const std::int64_t skipped = (kHugePage - begin % kHugePage) % kHugePage;
  const std::int64_t pages = (bytes - skipped) / kHugePage;
  if (pages <= 0) return;
  char* const aligned = static_cast<char*>(data) + skipped;
  if (madvise(aligned, static_cast<std::size_t>(pages * kHugePage), MADV_HUGEPAGE) != 0) return;
  // One worker meets nobody: it has every page cleared just before it writes there.
  if (executor_of(context).concurrency() == 1) return;
  for_each_range(context, pages, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t page = first; page < last; ++page) {
      // A write that keeps the byte.
      std::atomic_ref<char>(aligned[page * kHugePage]).fetch_or(0, std::memory_order_relaxed);
    }
  });
#else
  (void)data;
  (void)bytes;
  (void)context;
#endif
}

}  // namespace moegemm::cpu::simd
