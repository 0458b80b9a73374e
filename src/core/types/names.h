#pragma once

#include <iterator>
#include <optional>
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

/// The enumerator of that name; empty if there is none.
template <typename Table>
auto find_named(const Table& table, const std::string& name) {
  std::optional<decltype(std::begin(table)->value)> found;
  for (const auto& entry : table) {
    if (name == entry.name) found = entry.value;
  }
  return found;
}

/// The same; refuses other names.
template <typename Table>
auto value_named(const char* argument, const std::string& name, const Table& table) {
  const auto found = find_named(table, name);
  if (!found) refuse_value(argument, " is '", name, "'; accepted are ", list_of_names(table));
  return *found;
}

}  // namespace moegemm
