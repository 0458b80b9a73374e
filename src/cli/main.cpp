#include "program.h"

int main(int argc, char** argv) { return moegemm::cli::run_moegemm(argc, argv); }
