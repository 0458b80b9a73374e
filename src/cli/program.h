#pragma once

#include <string>
#include <vector>

namespace moegemm::cli {

/// What `moegemm plan ARGUMENTS` says, for a caller in the same process: the document of --json
/// with the `text` that is printed and the `svg` of --plot. Throws Error.
std::string plan_document(std::vector<std::string> arguments);

/// The program, from its arguments to its exit code. Throws nothing.
int run_moegemm(int argc, char** argv);

}  // namespace moegemm::cli
