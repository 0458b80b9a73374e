#pragma once

#include <iterator>
#include <string>

#include "core/refusal.h"

/// Looking into tables whose entries have a `value`, an enumerator, and its `name`.
namespace moegemm {

template <typename Table, typename Value>
const char* name_in(const Table& table, Value value) {
  for (const auto& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

/// "a, b and c"
template <typename Table>
std::string list_of_names(const Table& table) {
  std::string text;
  std::size_t left = std::size(table);
  for (const auto& entry : table) {
    text += join(text.empty() ? "" : left == 1 ? " and " : ", ", entry.name);
    --left;
  }
  return text;
}

/// The enumerator of that name; refuses others.
template <typename Table>
auto value_named(const char* argument, const std::string& name, const Table& table) {
  for (const auto& entry : table) {
    if (name == entry.name) return entry.value;
  }
  refuse_value(argument, " is '", name, "'; accepted are ", list_of_names(table));
}

}  // namespace moegemm
