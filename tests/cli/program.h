#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace moegemm::test {

struct ProgramResult {
  int exit_code = -1;
  std::string out;
  std::string err;

  /// `out` as JSON; throws when it is not.
  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

/// Runs `moegemm ARGUMENTS` through the shell and waits for it. The environment variable
/// MOEGEMM_PROGRAM names another executable than the one built beside the tests.
ProgramResult run_program(const std::string& arguments);

}  // namespace moegemm::test
