#include "cpu/simd/memory/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moegemm::cpu::simd {

void advise_huge_pages(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = 2 * 1024 * 1024;
  // Below this a buffer mostly comes from memory that the process has already touched.
  constexpr std::int64_t kWorthwhileBytes = 4 * 1024 * 1024;
  if (bytes < kWorthwhileBytes) return;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + static_cast<std::uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (first < last) {
    char* const aligned = static_cast<char*>(data) + (first - begin);
    madvise(aligned, last - first, MADV_HUGEPAGE);
  }
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace moegemm::cpu::simd
