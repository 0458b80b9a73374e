# What can be switched, and the flags that every target shares.
include(GNUInstallDirs)
include(CheckLanguage)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Programs of the build find the library beside them, also after the build folder was copied.
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(MOEGEMM_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (if nvcc is found), ON or OFF")
set_property(CACHE MOEGEMM_CUDA PROPERTY STRINGS AUTO ON OFF)
option(MOEGEMM_BUILD_CLI "Build the program moegemm" ON)
option(MOEGEMM_BUILD_TESTS "Build the C++ tests" ON)
option(MOEGEMM_BUILD_TORCH "Build the PyTorch operators (needs an installed torch)" OFF)
option(MOEGEMM_BUILD_BENCHMARKS "Build the C++ benchmarks" OFF)
set(MOEGEMM_GLIBC "" CACHE STRING
  "Oldest glibc that the PyTorch operators are to run with (2.28), or empty: this system's")
set(MOEGEMM_SANITIZE "" CACHE STRING "Sanitizers to build with, for instance address,undefined")

set(MOEGEMM_HAS_CUDA OFF)
if(NOT MOEGEMM_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
    if(nvcc_says MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS 13.0)
      set(too_old "nvcc ${CMAKE_MATCH_1} at ${CMAKE_CUDA_COMPILER} is too old: 13.0 or newer is needed")
      if(MOEGEMM_CUDA STREQUAL "ON")
        message(FATAL_ERROR "${too_old}. For a build without CUDA configure with -DMOEGEMM_CUDA=OFF, "
          "which is `make ... CUDA=OFF`")
      endif()
      message(WARNING "${too_old}. CUDA kernels are left out")
    else()
      set(MOEGEMM_HAS_CUDA ON)
    endif()
  elseif(MOEGEMM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOEGEMM_CUDA=ON, but no CUDA compiler was found: put nvcc 13.0 or newer on "
      "PATH or set CUDACXX, or configure with -DMOEGEMM_CUDA=OFF")
  endif()
endif()

# Flags for our own code only: a consumer of the installed package gets none of them.
add_library(moegemm_flags INTERFACE)
# -Werror=undef: a source that asks for MOEGEMM_HAS_CUDA and is not told would be built without CUDA.
target_compile_options(moegemm_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Werror=undef>)
if(MOEGEMM_SANITIZE)
  # -g1: reports need function names and lines, not variables, and it compiles a third faster.
  target_compile_options(moegemm_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${MOEGEMM_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all -g1>)
  target_link_options(moegemm_flags INTERFACE -fsanitize=${MOEGEMM_SANITIZE})
endif()

# moegemm_tell_cuda(<target> <source>...)
# Defines MOEGEMM_HAS_CUDA for these sources, and with CUDA finds its headers for them. All others are
# compiled by the same command with and without CUDA, so that a build with CUDA takes them over from one
# without.
function(moegemm_tell_cuda target)
  set_property(SOURCE ${ARGN} TARGET_DIRECTORY ${target} APPEND PROPERTY
    COMPILE_DEFINITIONS MOEGEMM_HAS_CUDA=$<BOOL:${MOEGEMM_HAS_CUDA}>)
  if(MOEGEMM_HAS_CUDA)
    list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND -isystem OUTPUT_VARIABLE headers)
    set_property(SOURCE ${ARGN} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS ${headers})
  endif()
endfunction()
