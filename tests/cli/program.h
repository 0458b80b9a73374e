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

/// Runs `moegemm ARGUMENTS` through the shell, after the shell commands `before`, and waits for it.
/// The environment variable MOEGEMM_TEST_PROGRAM names another executable than the one built beside
/// the tests.
ProgramResult run_program(const std::string& arguments, const std::string& before = {});

/// The same with a terminal for all of its output, which is returned.
std::string run_program_on_a_terminal(const std::string& arguments);

}  // namespace moegemm::test
