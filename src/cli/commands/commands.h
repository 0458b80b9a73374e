#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace moegemm::cli {

/// What the program ends with; scripts may rely on it.
enum ExitCode : int {
  kSuccess = 0,
  kCheckFailed = 1,    ///< it ran, and a result differs from the oracle
  kBadUsage = 2,       ///< the command line was refused
  kCannotRun = 3,      ///< the command is fine, this machine or build cannot run it
  kInterrupted = 130,  ///< Ctrl-C; what was found until then is kept
};

/// Runs a parsed subcommand and returns an ExitCode.
using Command = std::function<int()>;

/// Each declares its subcommand on `app` and returns what to do when it was chosen.
Command add_info_command(CLI::App& app);
Command add_plan_command(CLI::App& app);
Command add_run_command(CLI::App& app);
Command add_tune_command(CLI::App& app);
Command add_cache_command(CLI::App& app);

}  // namespace moegemm::cli
