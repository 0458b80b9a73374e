#include "cli/program.h"

#include <pty.h>
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

std::string program() {
  const char* chosen = std::getenv("MOEGEMM_TEST_PROGRAM");
  return chosen != nullptr ? chosen : MOEGEMM_PROGRAM;
}

}  // namespace

ProgramResult run_program(const std::string& arguments, const std::string& before) {
  static int runs = 0;
  const auto stem = std::filesystem::temp_directory_path() /
                    ("moegemm_cli_test_" + std::to_string(getpid()) + "_" + std::to_string(runs++));
  const std::string out_path = stem.string() + ".out";
  const std::string err_path = stem.string() + ".err";
  const std::string command = before + "'" + program() + "' </dev/null >'" + out_path + "' 2>'" +
                              err_path + "' " + arguments;
  const int status = std::system(command.c_str());
  if (status == -1 || !WIFEXITED(status)) throw std::runtime_error("did not exit: " + command);
  return {WEXITSTATUS(status), read_and_remove(out_path), read_and_remove(err_path)};
}

std::string run_program_on_a_terminal(const std::string& arguments) {
  const std::string command = "'" + program() + "' " + arguments;
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child < 0) throw std::runtime_error("there is no terminal");
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  std::string shown;
  char part[4096];
  // Ends with an error when the other side is closed.
  for (ssize_t count = 0; (count = read(terminal, part, sizeof part)) > 0;) {
    shown.append(part, static_cast<std::size_t>(count));
  }
  close(terminal);
  waitpid(child, nullptr, 0);
  return shown;
}

}  // namespace moegemm::test
