# The digest follows the sources, and the file is left alone while they stay: cmake -DSCRIPT=... -DFOLDER=... -P
file(REMOVE_RECURSE ${FOLDER})
set(compiler "compiler 1")

function(digest variable)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -DROOT=${FOLDER} -DOUTPUT=${FOLDER}/out/digest.cpp
      "-DCPU_COMPILER=${compiler}" -DCUDA_COMPILER=none -P ${SCRIPT}
    COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${FOLDER}/out/digest.cpp text)
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

function(line text device variable)
  string(REGEX MATCH "${device}_kernel_sources[^\n]+" found "${text}")
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

file(WRITE ${FOLDER}/src/cpu/simd/kernel.h "one")
file(WRITE ${FOLDER}/src/cuda/sm90/kernel.cuh "one")
digest(first)
file(TIMESTAMP ${FOLDER}/out/digest.cpp written "%s" UTC)
execute_process(COMMAND ${CMAKE_COMMAND} -E sleep 1.1)
digest(same)
file(TIMESTAMP ${FOLDER}/out/digest.cpp written_again "%s" UTC)
if(NOT first STREQUAL same OR NOT written STREQUAL written_again)
  message(FATAL_ERROR "unchanged sources gave another file")
endif()

file(WRITE ${FOLDER}/src/cuda/sm90/kernel.cuh "two")
digest(rewritten)
line("${first}" cpu cpu_first)
line("${rewritten}" cpu cpu_rewritten)
line("${first}" cuda cuda_first)
line("${rewritten}" cuda cuda_rewritten)
if(cuda_first STREQUAL cuda_rewritten OR NOT cpu_first STREQUAL cpu_rewritten)
  message(FATAL_ERROR "a rewritten CUDA kernel must change the CUDA digest only:\n${first}\n${rewritten}")
endif()

file(RENAME ${FOLDER}/src/cpu/simd/kernel.h ${FOLDER}/src/cpu/simd/other.h)
digest(renamed)
set(compiler "compiler 2")
digest(recompiled)
line("${renamed}" cpu cpu_renamed)
line("${recompiled}" cpu cpu_recompiled)
if(cpu_renamed STREQUAL cpu_first OR cpu_recompiled STREQUAL cpu_renamed)
  message(FATAL_ERROR "another file name or compiler must change the digest")
endif()
file(REMOVE_RECURSE ${FOLDER})
