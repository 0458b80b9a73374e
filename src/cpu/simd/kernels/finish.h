#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/element.h"

/// The end of every kernel: fp32 sums get their bias and their router weight, are rounded once and
/// stored.
namespace moegemm::cpu::simd {
namespace {

template <class Isa, class T>
void finish_row_as(const float* sums, T* out, std::int64_t cols, const float* bias,
                   const float* router_weight) {
  const typename Isa::Vec factor = Isa::broadcast(router_weight != nullptr ? *router_weight : 1.0f);
  std::int64_t c = 0;
  for (; c + Isa::kLanes <= cols; c += Isa::kLanes) {
    typename Isa::Vec sum = Isa::load(sums + c);
    if (bias != nullptr) sum = Isa::add(sum, Isa::load(bias + c));
    if (router_weight != nullptr) sum = Isa::mul(sum, factor);
    Isa::store(out + c, sum);
  }
  if (c < cols) {
    typename Isa::Vec sum = Isa::load(sums + c);
    if (bias != nullptr) sum = Isa::add(sum, Isa::load(bias + c));
    if (router_weight != nullptr) sum = Isa::mul(sum, factor);
    Isa::store_partial(out + c, sum, cols - c);
  }
}

/// Rounds sums and bias [cols, readable up to a whole vector] into one output row.
template <class Isa>
void finish_row(const float* sums, void* out, DType dtype, std::int64_t first_col,
                std::int64_t cols, const float* bias, const float* router_weight) {
  with_element_type(dtype, [&]<class T>(T*) {
    finish_row_as<Isa>(sums, static_cast<T*>(out) + first_col, cols, bias, router_weight);
  });
}

/// Rounds `cols` sums of `rows` rows from number `first` on, [rows][stride], into the columns from
/// `col` on of a task's output.
template <class Isa>
void finish_rows(const OutputRows& out, std::int64_t first, std::int64_t rows, const float* sums,
                 std::int64_t stride, std::int64_t col, std::int64_t cols) {
  for (std::int64_t row = first; row < first + rows; ++row, sums += stride) {
    if (out.rows[row] == nullptr) continue;
    finish_row<Isa>(sums, out.rows[row], out.dtype, out.first_col + col, cols,
                    out.bias != nullptr ? out.bias + col : nullptr,
                    out.router_weights != nullptr ? out.router_weights + row : nullptr);
  }
}

/// out[cols] += sums, in fp32.
template <class Isa>
void accumulate_row(const float* sums, float* out, std::int64_t cols) {
  std::int64_t c = 0;
  for (; c + Isa::kLanes <= cols; c += Isa::kLanes) {
    Isa::store(out + c, Isa::add(Isa::load(out + c), Isa::load(sums + c)));
  }
  if (c < cols) {
    const typename Isa::Vec old = Isa::load_partial(out + c, cols - c);
    Isa::store_partial(out + c, Isa::add(old, Isa::load(sums + c)), cols - c);
  }
}

/// Like finish_row_as, past the caches: whole lines only, so `out` must start one and `cols` fill
/// some. False when that is not so; nothing is written then.
template <class Isa, class T>
bool stream_row_as(const float* sums, T* out, std::int64_t cols) {
  constexpr std::int64_t kLineElems = 64 / std::int64_t{sizeof(T)};
  if (reinterpret_cast<std::uintptr_t>(out) % 64 != 0 || cols % kLineElems != 0) return false;
  for (std::int64_t c = 0; c < cols; c += kLineElems) Isa::stream_line(out + c, sums + c);
  return true;
}

}  // namespace
}  // namespace moegemm::cpu::simd
