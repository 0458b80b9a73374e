#include "moegemm/error.h"
#include "moegemm/kinds.h"
#include "program.h"

/// The program `moegemm` in the process of a Python interpreter that runs nothing else.
extern "C" MOEGEMM_API int moegemm_program(int argc, char** argv) {
  moegemm::set_warning_handler({});  // to the standard error again, where a program's belong
  return moegemm::cli::run_moegemm(argc, argv);
}
