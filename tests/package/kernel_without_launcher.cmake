# Configures without ccache or any other compiler launcher, as plain CMake and `pip install .` do, and
# compiles one small kernel.
set(work ${BUILD_DIR}/tests/package/no_launcher)
file(REMOVE_RECURSE ${work})
set(object src/CMakeFiles/moegemm_objects.dir/cuda/backend/measure/spin.cu.o)

function(run)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=CMAKE_CXX_COMPILER_LAUNCHER
    --unset=CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_COMMAND} ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(-S ${SOURCE_DIR} -B ${work} -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CUDA_COMPILER=${NVCC} -DMOEGEMM_CUDA=ON -DMOEGEMM_CUDA_ARCHS=80
  -DMOEGEMM_BUILD_CLI=OFF -DMOEGEMM_BUILD_TESTS=OFF)
file(STRINGS ${work}/CMakeCache.txt launchers REGEX "_COMPILER_LAUNCHER:[A-Z]+=.")
if(launchers)
  message(FATAL_ERROR "a launcher was found after all: ${launchers}")
endif()
run(--build ${work} --target ${object})
if(NOT EXISTS ${work}/${object})
  message(FATAL_ERROR "${work}/${object} was not made")
endif()
file(REMOVE_RECURSE ${work})
