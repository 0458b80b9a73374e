#include "program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "commands/commands.h"
#include "moegemm/error.h"
#include "moegemm/info.h"

namespace {

using namespace moegemm::cli;

int exit_code(const moegemm::Error& error) {
  switch (error.kind()) {
    case moegemm::ErrorKind::kInvalidValue:
    case moegemm::ErrorKind::kInvalidType:
      return kBadUsage;
    default:
      return kCannotRun;
  }
}

/// What went wrong, with what would have been accepted instead.
std::string explain(const CLI::App& app, const CLI::App& chosen, const CLI::ParseError& error) {
  const std::vector<std::string> unknown = app.remaining(true);
  if (&app == &chosen ||
      (!chosen.get_subcommands({}).empty() && chosen.get_subcommands().empty())) {
    std::vector<std::string> names;
    for (const CLI::App* command : chosen.get_subcommands({})) names.push_back(command->get_name());
    return unknown.empty()
               ? fmt::format("a command is required; accepted: {}", fmt::join(names, ", "))
               : fmt::format("unknown command {}; accepted: {}", unknown.front(),
                             fmt::join(names, ", "));
  }
  if (!unknown.empty()) {
    std::vector<std::string> names;
    for (const CLI::Option* option : chosen.get_options()) names.push_back(option->get_name());
    return fmt::format("unknown argument {}; accepted: {}", unknown.front(),
                       fmt::join(names, ", "));
  }
  return error.what();
}

int report_usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const auto subcommands = app.get_subcommands();
  const CLI::App& chosen = subcommands.empty() ? app : *subcommands.front();
  const std::string command =
      &chosen == &app ? app.get_name() : app.get_name() + " " + chosen.get_name();
  fmt::print(stderr, "{}: {}\nRun '{} --help' for what each option means.\n", command,
             explain(app, chosen, error), command);
  return kBadUsage;
}

int run_program(int argc, char** argv) {
  CLI::App app(
      "Matrix products of Mixture-of-Experts layers: what this build and machine offer, which\n"
      "kernel a layer gets and which one is fastest, and a checked run of a whole layer.\n\n"
      "Exit codes: 0 success, 1 a check failed, 2 the command line was refused, 3 this machine or\n"
      "build cannot run it, 130 interrupted.",
      "moegemm");
  app.set_version_flag("-V,--version", "moegemm " + moegemm::version());
  app.require_subcommand(1);
  // A flag given twice: the last one counts, so that a script's defaults can be overridden.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const std::vector<std::pair<std::string, Command>> commands = {
      {"info", add_info_command(app)},   {"plan", add_plan_command(app)},
      {"run", add_run_command(app)},     {"tune", add_tune_command(app)},
      {"cache", add_cache_command(app)},
  };
  try {
    app.parse(argc, argv);
    for (const auto& [name, command] : commands) {
      if (app.got_subcommand(name)) return command();
    }
  } catch (const CLI::ParseError& error) {
    // --help and --version arrive here too, as successes.
    return error.get_exit_code() == 0 ? app.exit(error) : report_usage_error(app, error);
  }
  return kBadUsage;
}

}  // namespace

namespace moegemm::cli {

// Messages not with fmt, which throws when it cannot write.
int run_moegemm(int argc, char** argv) {
  try {
    check_environment();
    const int code = run_program(argc, argv);
    // Or a disk that is full would go unnoticed.
    if (std::fflush(stdout) != 0) {
      throw Error(ErrorKind::kRuntime,
                  std::string("cannot write to the standard output: ") + std::strerror(errno));
    }
    return code;
  } catch (const Error& error) {
    std::fprintf(stderr, "moegemm: %s\n", error.what());
    return exit_code(error);
  } catch (const std::bad_alloc&) {
    std::fputs("moegemm: out of memory\n", stderr);
    return kCannotRun;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moegemm: %s\n", error.what());
    return kCannotRun;
  }
}

}  // namespace moegemm::cli
