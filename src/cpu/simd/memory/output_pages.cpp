#include "cpu/simd/memory/output_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <deque>

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

/// The whole huge pages of an output.
struct FreshPages {
  OutputSpan out;
  std::int64_t skipped;  ///< bytes before the first of them
  std::int64_t pages;
  bool huge;
  std::atomic<Clock::rep> ticks = 0;  ///< that all workers together took
  std::atomic<bool> fresh = false;    ///< some got small pages just now

  FreshPages(const OutputSpan& span, std::int64_t skip, std::int64_t count, bool is_huge)
      : out(span), skipped(skip), pages(count), huge(is_huge) {}

  char* at(std::int64_t page) const {
    return static_cast<char*>(out.data) + skipped + page * kHugePage;
  }

  /// Pages [begin, end), by one worker.
  void prepare(std::int64_t begin, std::int64_t end) {
    const Clock::time_point start = Clock::now();
    for (std::int64_t page = begin; page < end; ++page) {
      if (huge) {
        const std::int64_t first = first_row_byte(out, skipped + page * kHugePage);
        if (first < skipped + (page + 1) * kHugePage) touch(static_cast<char*>(out.data) + first);
      } else if (!present(at(page))) {
        // Small pages without a fault for each.
        madvise(at(page), kHugePage, MADV_POPULATE_WRITE);
        fresh.store(true, std::memory_order_relaxed);
      }
    }
    ticks.fetch_add((Clock::now() - start).count(), std::memory_order_relaxed);
  }

  void report() const {
    if (huge) {
      record.touched(pages, Clock::duration(ticks.load(std::memory_order_relaxed)));
    } else if (fresh.load(std::memory_order_relaxed)) {
      record.went_without(pages);
    }
  }
};

/// Adds the pages of an output that workers should touch; advises the system where that is all.
void collect(const OutputSpan& out, bool alone, std::deque<FreshPages>& found) {
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
  const bool huge = record.worthwhile(pages);
  // Populating writes to every small page, so each must hold a part of some row.
  if (!huge && gap_bytes >= kSmallPage) return;
  if (huge && madvise(aligned, static_cast<std::size_t>(pages * kHugePage), MADV_HUGEPAGE) != 0) {
    return;
  }
  // One worker meets nobody: it has every page cleared just before it writes there.
  if (!alone) found.emplace_back(out, skipped, pages, huge);
}

}  // namespace
#endif

void prepare_output_pages(std::span<const OutputSpan> outputs, const ExecutionContext& context) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto is_large = [](const OutputSpan& out) { return out.bytes() >= kWorthwhileBytes; };
  if (std::none_of(outputs.begin(), outputs.end(), is_large)) return;
  const bool alone = executor_of(context).concurrency() == 1;
  std::deque<FreshPages> found;
  std::int64_t pages = 0;
  for (const OutputSpan& out : outputs) collect(out, alone, found);
  for (const FreshPages& one : found) pages += one.pages;
  for_each_range(context, pages, 1, [&](std::int64_t begin, std::int64_t end) {
    for (FreshPages& one : found) {
      one.prepare(std::clamp<std::int64_t>(begin, 0, one.pages),
                  std::clamp<std::int64_t>(end, 0, one.pages));
      begin -= one.pages, end -= one.pages;
    }
  });
  for (const FreshPages& one : found) one.report();
#else
  (void)outputs;
  (void)context;
#endif
}

}  // namespace moegemm::cpu::simd
