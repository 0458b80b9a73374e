#pragma once

#include <cstdint>
#include <string_view>

namespace moegemm::testing {

/// splitmix64's last part: every bit of the result depends on every bit of `x`.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
/// Its first part adds this: 2^64 divided by the golden ratio.
inline constexpr std::uint64_t kGoldenStep = 0x9E3779B97F4A7C15u;

/// splitmix64: small, fast, and the same numbers with every standard library, so that a printed
/// seed reproduces a failure on another machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() { return mix_bits(state_ += kGoldenStep); }
  /// In [0, count); count >= 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(count));
  }
  /// In [first, last].
  std::int64_t between(std::int64_t first, std::int64_t last) {
    return first + below(last - first + 1);
  }
  /// In [-1, 1), both signs equally likely: partial sums then walk at random, which the
  /// comparison's bound rests on.
  float symmetric() {
    return static_cast<float>(static_cast<std::int64_t>(bits()) >> 40) * 0x1p-23f;
  }
  bool chance(int one_in) { return below(one_in) == 0; }

 private:
  std::uint64_t state_;
};

/// A seed that depends on the name alone (FNV-1a).
constexpr std::uint64_t seed_from(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

}  // namespace moegemm::testing
