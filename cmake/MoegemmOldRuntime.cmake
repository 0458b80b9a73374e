# Links a shared library so that it runs with glibc MOEGEMM_GLIBC and the libstdc++ of its time, on a newer system.
# old_runtime.py writes stand-ins for the C and C++ libraries; what the old libstdc++ has not is taken from this
# system's static one. Not for programs: their start-up code comes with the new glibc.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# moegemm_link_old_runtime(<target>)
function(moegemm_link_old_runtime target)
  set(folder ${PROJECT_BINARY_DIR}/old_runtime)
  execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/old_runtime.py
    --glibc ${MOEGEMM_GLIBC} --compiler ${CMAKE_CXX_COMPILER} --out ${folder} COMMAND_ERROR_IS_FATAL ANY)
  foreach(archive libstdc++.a libc_nonshared.a)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${archive}
      OUTPUT_VARIABLE ${archive} OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  # Nothing may stay undefined: it would be something that the old release lacks.
  target_link_options(${target} PRIVATE -nodefaultlibs "LINKER:-z,defs"
    "LINKER:--exclude-libs,libstdc++.a:libc_nonshared.a" "LINKER:--no-as-needed")
  # A static library after the stand-in of the shared one: it gives only what that has not.
  target_link_libraries(${target} PRIVATE ${folder}/libstdc++.so.6 ${libstdc++.a} ${folder}/libm.so.6
    ${folder}/libgcc_s.so.1 ${folder}/libc.so.6 ${libc_nonshared.a} ${folder}/ld-linux-x86-64.so.2
    ${folder}/libpthread.so.0 ${folder}/libdl.so.2 ${folder}/librt.so.1 -lgcc)
endfunction()
