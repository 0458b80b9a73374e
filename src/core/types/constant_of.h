#pragma once

#include <cstddef>
#include <iterator>

namespace moegemm {

/// Calls body.operator()<V>() where V is `value`, found in a table of entries with a `value` each:
/// code that is compiled for every enumerator.
template <const auto& kTable, std::size_t I = 0, typename Value, typename Body>
constexpr void with_constant(Value value, const Body& body) {
  if (value == kTable[I].value) {
    body.template operator()<kTable[I].value>();
  } else if constexpr (I + 1 < std::size(kTable)) {
    with_constant<kTable, I + 1>(value, body);
  }
}

}  // namespace moegemm
