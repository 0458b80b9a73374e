#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/element.h"

/// The end of every kernel: fp32 sums are scaled, rounded once and stored.
namespace moegemm::cpu::simd {
namespace {

template <class Isa, class T>
void finish_quads_as(const float* quads, const OutputRows& out, std::int64_t row, std::int64_t rows,
                     std::int64_t col, std::int64_t valid) {
  for (std::int64_t i = 0; i < rows; ++i) {
    T* destination = static_cast<T*>(out.rows[row + i]);
    if (destination == nullptr) continue;
    destination += out.first_col + col;
    typename Isa::Quad sums = Isa::load_quad(quads + 4 * i);
    if (out.scales != nullptr) sums = Isa::scale_quad(sums, out.scales[row + i]);
    if (valid == 4) {
      Isa::store_quad(destination, sums);
    } else {
      T rounded[4];
      Isa::store_quad(rounded, sums);
      for (std::int64_t j = 0; j < valid; ++j) destination[j] = rounded[j];
    }
  }
}

/// Stores quads [rows][4], of which `valid` columns exist, at rows `row`... and column `col`.
template <class Isa>
void finish_quads(const float* quads, const OutputRows& out, std::int64_t row, std::int64_t rows,
                  std::int64_t col, std::int64_t valid) {
  switch (out.dtype) {
    case DType::kBFloat16:
      return finish_quads_as<Isa, Bf16>(quads, out, row, rows, col, valid);
    case DType::kFloat16:
      return finish_quads_as<Isa, Fp16>(quads, out, row, rows, col, valid);
    default:
      return finish_quads_as<Isa, float>(quads, out, row, rows, col, valid);
  }
}

template <class Isa, class T>
void finish_row_as(const float* sums, T* out, std::int64_t cols, const float* scale) {
  const typename Isa::Vec factor = Isa::broadcast(scale != nullptr ? *scale : 1.0f);
  std::int64_t c = 0;
  for (; c + Isa::kLanes <= cols; c += Isa::kLanes) {
    typename Isa::Vec sum = Isa::load(sums + c);
    if (scale != nullptr) sum = Isa::mul(sum, factor);
    Isa::store(out + c, sum);
  }
  if (c < cols) {
    typename Isa::Vec sum = Isa::load(sums + c);
    if (scale != nullptr) sum = Isa::mul(sum, factor);
    Isa::store_partial(out + c, sum, cols - c);
  }
}

/// Rounds sums [cols, readable up to a whole vector] into one output row.
template <class Isa>
void finish_row(const float* sums, void* out, DType dtype, std::int64_t first_col,
                std::int64_t cols, const float* scale) {
  switch (dtype) {
    case DType::kBFloat16:
      return finish_row_as<Isa>(sums, static_cast<Bf16*>(out) + first_col, cols, scale);
    case DType::kFloat16:
      return finish_row_as<Isa>(sums, static_cast<Fp16*>(out) + first_col, cols, scale);
    default:
      return finish_row_as<Isa>(sums, static_cast<float*>(out) + first_col, cols, scale);
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

/// Like finish_row, past the caches: whole lines only, so `out` must start one and `cols` fill
/// some.
template <class Isa, class T>
bool stream_row_as(const float* sums, T* out, std::int64_t cols) {
  constexpr std::int64_t kLineElems = 64 / std::int64_t{sizeof(T)};
  if (reinterpret_cast<std::uintptr_t>(out) % 64 != 0 || cols % kLineElems != 0) return false;
  for (std::int64_t c = 0; c < cols; c += kLineElems) Isa::stream_line(out + c, sums + c);
  return true;
}

/// False when alignment does not allow it; nothing is written then.
template <class Isa>
bool stream_row(const float* sums, void* out, DType dtype, std::int64_t cols) {
  if constexpr (!Isa::kStreams) {
    return false;
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return stream_row_as<Isa>(sums, static_cast<Bf16*>(out), cols);
      case DType::kFloat16:
        return stream_row_as<Isa>(sums, static_cast<Fp16*>(out), cols);
      default:
        return stream_row_as<Isa>(sums, static_cast<float*>(out), cols);
    }
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
