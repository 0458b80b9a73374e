#include "cli/program.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace moegemm::test {
namespace {

std::string read_and_remove(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  return text.str();
}

}  // namespace

ProgramResult run_program(const std::string& arguments) {
  static int runs = 0;
  const char* chosen = std::getenv("MOEGEMM_PROGRAM");
  const std::string program = chosen != nullptr ? chosen : MOEGEMM_PROGRAM;
  const auto stem = std::filesystem::temp_directory_path() /
                    ("moegemm_cli_test_" + std::to_string(getpid()) + "_" + std::to_string(runs++));
  const std::string out_path = stem.string() + ".out";
  const std::string err_path = stem.string() + ".err";
  const std::string command =
      "'" + program + "' " + arguments + " >'" + out_path + "' 2>'" + err_path + "' </dev/null";
  const int status = std::system(command.c_str());
  if (status == -1 || !WIFEXITED(status)) throw std::runtime_error("did not exit: " + command);
  return {WEXITSTATUS(status), read_and_remove(out_path), read_and_remove(err_path)};
}

}  // namespace moegemm::test
