#include <exception>
#include <string>
#include <vector>

#include "moegemm/error.h"
#include "moegemm/kinds.h"
#include "program.h"

/// The program `moegemm` in the process of a Python interpreter that runs nothing else.
extern "C" MOEGEMM_API int moegemm_program(int argc, char** argv) {
  moegemm::set_warning_handler({});  // to the standard error again, where a program's belong
  return moegemm::cli::run_moegemm(argc, argv);
}

/// What `moegemm plan` says (cli::plan_document), handed to `take`; or why it says nothing, and the
/// ErrorKind of that. -1: it was said.
extern "C" MOEGEMM_API int moegemm_plan(int count, char** arguments, void (*take)(const char*)) {
  try {
    take(moegemm::cli::plan_document({arguments, arguments + count}).c_str());
    return -1;
  } catch (const moegemm::Error& error) {
    take(error.what());
    return static_cast<int>(error.kind());
  } catch (const std::exception& error) {
    take(error.what());
    return static_cast<int>(moegemm::ErrorKind::kRuntime);
  }
}
