# CUDA: the language, the toolkit and how our device code is compiled. Included from the top folder
# because a language must be enabled above every target that uses it.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # every source names its own, see below
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} at ${CMAKE_CUDA_COMPILER} is too old: 13.0 "
    "or newer is needed; configure with -DMOEGEMM_CUDA=OFF for a build without CUDA")
endif()
find_package(CUDAToolkit 13.0 REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)  # runs ptxas_check.py

set(MOEGEMM_CUDA_ARCHS "80;90" CACHE STRING
  "Compute capabilities to compile for, ascending; releases: 80;86;89;90a;100;120")

option(MOEGEMM_CUDA_COMPRESS "Compress the kernels for size, as releases do" OFF)

# Passes are plain CUDA: machine code for the listed architectures, and PTX of compute capability 9.0, or of the newest
# before it, for every later GPU that is not listed (11.0 comes after 10.0 and runs no PTX of 12.0).
set(MOEGEMM_PASS_GENCODE "")
set(ptx "")
foreach(arch IN LISTS MOEGEMM_CUDA_ARCHS)
  list(APPEND MOEGEMM_PASS_GENCODE "-gencode=arch=compute_${arch},code=sm_${arch}")
  string(REGEX MATCH "^[0-9]+" arch "${arch}")  # PTX of "90a" would run on that alone
  if(NOT ptx OR ptx LESS 90)
    set(ptx ${arch})
  endif()
endforeach()
list(APPEND MOEGEMM_PASS_GENCODE "-gencode=arch=compute_${ptx},code=compute_${ptx}")

# The mma.sync kernels use nothing beyond the oldest architecture: one front-end pass for it, machine
# code for all, and its PTX for every GPU that is newer and not listed. "90a" is "90" to them. Some of
# them are for compute capability 9.0 and newer only.
function(moegemm_gencode_from least result)
  set(codes "")
  foreach(arch IN LISTS MOEGEMM_CUDA_ARCHS)
    string(REGEX MATCH "^[0-9]+" arch "${arch}")
    if(arch GREATER_EQUAL least)
      string(APPEND codes "sm_${arch},")
    endif()
  endforeach()
  set(${result} "-gencode=arch=compute_${least},code=[${codes}compute_${least}]" PARENT_SCOPE)
endfunction()
list(GET MOEGEMM_CUDA_ARCHS 0 arch)
string(REGEX MATCH "^[0-9]+" arch "${arch}")
moegemm_gencode_from(${arch} MOEGEMM_SM80_GENCODE)
if(arch LESS 90)
  set(arch 90)
endif()
moegemm_gencode_from(${arch} MOEGEMM_SM80_GENCODE_90)

# wgmma and setmaxnreg exist in sm_90a alone, which has no forward compatible PTX.
set(MOEGEMM_SM90_GENCODE "-gencode=arch=compute_90a,code=sm_90a")

# One token per option: CMake removes repeated tokens, and a bare -Xptxas would be one.
set(MOEGEMM_CUDA_OPTIONS --expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-Wall,-Wextra)
if(MOEGEMM_CUDA_COMPRESS)
  list(APPEND MOEGEMM_CUDA_OPTIONS --compress-mode=size)
endif()

# moegemm_add_cuda_sources(<target> <gencode list variable> <source>...)
# Adds device sources with their architectures, relative to the current folder.
function(moegemm_add_cuda_sources target gencode)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" REGEX "^[^/]")
  target_sources(${target} PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES
    COMPILE_OPTIONS "${MOEGEMM_CUDA_OPTIONS};${${gencode}}"
    OBJECT_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/ptxas_check.py")
endfunction()

# moegemm_check_ptxas(<target>)
# Compiles the CUDA sources of the target under ptxas_check.py, which fails the build on register
# spills and serialised wgmma, in front of whatever launcher (ccache) the user asked for. Registers
# and shared memory of every kernel are summed up in ptxas-report.txt in the build folder.
function(moegemm_check_ptxas target)
  # Unquoted: no launcher is no argument, where an empty one would be taken for the compiler.
  set(launcher ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/ptxas_check.py
    --summary=${PROJECT_BINARY_DIR}/ptxas-report.txt -- ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endfunction()
