#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"

/// What a task of dX contracts: its own weight rows, then those of its low-rank part.
namespace moegemm::cpu::simd {
namespace {

/// A stretch of the contraction: the task's own, or its low-rank part.
template <class T>
struct DxSpan {
  const T* const* rows;  // of dY
  const T* w;
  std::int64_t w_stride;
  std::int64_t terms;
  bool starts;  // the sums
  bool ends;    // them
};

/// Calls body(span) for the one or two of a task.
template <class T, class Body>
[[gnu::always_inline]] inline void for_each_span(const DxTask& task, const Body& body) {
  const bool has_low = task.low.rank > 0;
  body(DxSpan<T>{reinterpret_cast<const T* const*>(task.dy), static_cast<const T*>(task.w),
                 task.w_stride, task.n, true, !has_low});
  if (!has_low) return;
  body(DxSpan<T>{reinterpret_cast<const T* const*>(task.low.rows),
                 static_cast<const T*>(task.low.w), task.low.w_stride, task.low.rank, false, true});
}

}  // namespace
}  // namespace moegemm::cpu::simd
