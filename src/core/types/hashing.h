#pragma once

#include <cstddef>
#include <cstdint>

namespace moegemm {

/// Folds one more value into a hash: a multiply and a shift spread every input bit, which the
/// identity hash of small integers does not.
constexpr std::size_t fold_hash(std::size_t seed, std::uint64_t value) {
  const std::uint64_t mixed = (seed ^ value) * 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio
  return mixed ^ (mixed >> 32);
}

}  // namespace moegemm
