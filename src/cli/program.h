#pragma once

namespace moegemm::cli {

/// The program, from its arguments to its exit code. Throws nothing.
int run_moegemm(int argc, char** argv);

}  // namespace moegemm::cli
