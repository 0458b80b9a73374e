#include "cpu/simd/memory/output_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>

#include "cpu/parallel.h"
#include "cpu/simd/memory/huge_page_record.h"

namespace moegemm::cpu::simd {

#if defined(__linux__) && defined(MADV_HUGEPAGE)
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE \
  23  // Linux 5.14; older systems refuse it, and the pages come one by one
#endif

using Clock = HugePageRecord::Clock;

constexpr std::int64_t kSmallPage = 4096;
constexpr std::int64_t kHugePage = 2 * 1024 * 1024;
/// Below this a buffer mostly comes from memory that the process has already touched.
constexpr std::int64_t kWorthwhileBytes = 2 * kHugePage;

HugePageRecord record;

/// A write that keeps the byte.
void touch(char* at) { std::atomic_ref<char>(*at).fetch_or(0, std::memory_order_relaxed); }

bool present(char* at) {
  unsigned char resident = 1;
  return mincore(at, 1, &resident) != 0 || (resident & 1) != 0;
}

/// The first byte of a row at or after `offset`, which is in the span.
std::int64_t first_row_byte(const OutputSpan& out, std::int64_t offset) {
  const std::int64_t row = offset / out.pitch_bytes;
  return offset - row * out.pitch_bytes < out.row_bytes ? offset : (row + 1) * out.pitch_bytes;
}

/// `pages` huge pages from `skipped` bytes into the output on.
void touch_huge_pages(const OutputSpan& out, std::int64_t skipped, std::int64_t pages,
                      const ExecutionContext& context) {
  std::atomic<Clock::rep> ticks = 0;
  for_each_range(context, pages, 1, [&](std::int64_t begin, std::int64_t end) {
    const Clock::time_point start = Clock::now();
    for (std::int64_t page = begin; page < end; ++page) {
      const std::int64_t at = first_row_byte(out, skipped + page * kHugePage);
      if (at < skipped + (page + 1) * kHugePage) touch(static_cast<char*>(out.data) + at);
    }
    ticks.fetch_add((Clock::now() - start).count(), std::memory_order_relaxed);
  });
  record.touched(pages, Clock::duration(ticks.load(std::memory_order_relaxed)));
}

/// Small pages under what is fresh, without a fault for each.
void populate(char* first, std::int64_t pages, const ExecutionContext& context) {
  std::atomic<bool> fresh = false;
  for_each_range(context, pages, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t page = begin; page < end; ++page) {
      char* const at = first + page * kHugePage;
      if (present(at)) continue;
      madvise(at, kHugePage, MADV_POPULATE_WRITE);
      fresh.store(true, std::memory_order_relaxed);
    }
  });
  if (fresh.load(std::memory_order_relaxed)) record.went_without(pages);
}

}  // namespace
#endif

void prepare_output_pages(const OutputSpan& out, const ExecutionContext& context) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const std::int64_t bytes = out.bytes();
  if (bytes < kWorthwhileBytes) return;
  // Huge pages cover the gaps between rows too: no more memory for those than for the rows.
  const std::int64_t gap_bytes = out.rows > 1 ? out.pitch_bytes - out.row_bytes : 0;
  if (gap_bytes > out.row_bytes) return;
  const std::int64_t begin = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out.data));
  const std::int64_t skipped = (kHugePage - begin % kHugePage) % kHugePage;
  const std::int64_t pages = (bytes - skipped) / kHugePage;
  if (pages <= 0) return;
  char* const aligned = static_cast<char*>(out.data) + skipped;
  // One worker meets nobody: it has every page cleared just before it writes there.
  const bool alone = executor_of(context).concurrency() == 1;
  if (!record.worthwhile(pages)) {
    // Populating writes to every small page, so each must hold a part of some row.
    if (!alone && gap_bytes < kSmallPage) populate(aligned, pages, context);
    return;
  }
  if (madvise(aligned, static_cast<std::size_t>(pages * kHugePage), MADV_HUGEPAGE) != 0) return;
  if (!alone) touch_huge_pages(out, skipped, pages, context);
#else
  (void)out;
  (void)context;
#endif
}

}  // namespace moegemm::cpu::simd
