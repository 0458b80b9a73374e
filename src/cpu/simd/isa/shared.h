#pragma once

#include <cstdint>

/// What the vectors of several instruction sets share. `Isa` is the struct that derives from these.
namespace moegemm::cpu::simd {
namespace {

struct Prefetches {
  // Inlined by force: GCC takes a function that only prefetches for one without effect and drops
  // the call.
  [[gnu::always_inline]] static void prefetch_write(const void* at) {
    __builtin_prefetch(at, 1, 2);
  }
  [[gnu::always_inline]] static void prefetch_l1(const void* at) { __builtin_prefetch(at, 0, 3); }
  [[gnu::always_inline]] static void prefetch_l2(const void* at) { __builtin_prefetch(at, 0, 2); }
};

/// Parts of a vector by way of a whole one, where there are no masks, and no stores past the
/// caches.
template <class Isa>
struct CopiedParts {
  static constexpr bool kStreams = false;
  static void stream_fence() {}

  template <class T>
  static auto load_partial(const T* at, std::int64_t count) {
    T whole[Isa::kLanes] = {};
    for (std::int64_t i = 0; i < count; ++i) whole[i] = at[i];
    return Isa::load(whole);
  }
  template <class T, class Vec>
  static void store_partial(T* at, Vec v, std::int64_t count) {
    T whole[Isa::kLanes];
    Isa::store(whole, v);
    for (std::int64_t i = 0; i < count; ++i) at[i] = whole[i];
  }
};

/// Steps of the forward kernel: floats as they are, 16-bit numbers widened.
template <class Isa, class T>
struct WidenedDot {
  using Vec = typename Isa::Vec;
  using Reg = Vec;
  static constexpr std::int64_t kStep = Isa::kLanes;
  static constexpr int kPasses = 1;
  template <int Pass>
  static Reg load(const T* at) {
    return Isa::load(at);
  }
  template <int Pass>
  static Reg load_partial(const T* at, std::int64_t count) {
    return Isa::load_partial(at, count);
  }
  static Vec accumulate(Vec acc, Reg a, Reg b) { return Isa::fma(a, b, acc); }
};

}  // namespace
}  // namespace moegemm::cpu::simd
