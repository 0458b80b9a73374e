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
find_package(CUDAToolkit 13.0 REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)  # runs ptxas_check.py and instances.py

set(MOEGEMM_CUDA_ARCHS "80;90" CACHE STRING
  "Compute capabilities to compile for, ascending, or `all`: what packages hold, compressed")
set(compress "")
if(MOEGEMM_CUDA_ARCHS STREQUAL "all")
  set(MOEGEMM_CUDA_ARCHS 80 86 89 90a 100 120)
  set(compress --compress-mode=size)
endif()

# Hopper's own kernels run on 9.0 alone. The tests look inside them whatever is listed.
set(MOEGEMM_HAS_SM90 ${MOEGEMM_BUILD_TESTS})
if("${MOEGEMM_CUDA_ARCHS}" MATCHES "(^|;)90a?(;|$)")
  set(MOEGEMM_HAS_SM90 ON)
endif()

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

# moegemm_gencode(<result> <arch> <exact>)
# Kernels for a compute capability and newer ones use nothing beyond it: one front-end pass for it or
# the oldest listed one, machine code for all, and PTX for every GPU that is newer and not listed.
# "90a" is "90" to them. What is exact uses instructions of one architecture (wgmma, setmaxnreg),
# which has no forward compatible PTX.
function(moegemm_gencode result arch exact)
  if(exact)
    set(${result} "-gencode=arch=compute_${arch}a,code=sm_${arch}a" PARENT_SCOPE)
    return()
  endif()
  list(GET MOEGEMM_CUDA_ARCHS 0 least)
  string(REGEX MATCH "^[0-9]+" least "${least}")
  if(least LESS arch)
    set(least ${arch})
  endif()
  set(codes "")
  foreach(listed IN LISTS MOEGEMM_CUDA_ARCHS)
    string(REGEX MATCH "^[0-9]+" listed "${listed}")
    if(listed GREATER_EQUAL least)
      string(APPEND codes "sm_${listed},")
    endif()
  endforeach()
  set(${result} "-gencode=arch=compute_${least},code=[${codes}compute_${least}]" PARENT_SCOPE)
endfunction()

# One token per option: CMake removes repeated tokens, and a bare -Xptxas would be one.
set(MOEGEMM_CUDA_OPTIONS --expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-Wall,-Wextra ${compress})

# moegemm_add_cuda_sources(<target> <gencode list variable> <source>...)
# Adds device sources with their architectures, relative to the current folder.
function(moegemm_add_cuda_sources target gencode)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" REGEX "^[^/]")
  target_sources(${target} PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES
    COMPILE_OPTIONS "${MOEGEMM_CUDA_OPTIONS};${${gencode}}"
    OBJECT_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/ptxas_check.py")
endfunction()

# moegemm_add_generation(<target> <generation> <arch> [EXACT] [TOGETHER <field>...])
# What lies in the folder <generation>, host code and launches, and the kernels of
# instances/<generation>.inc in the sources that instances.py makes of it. <arch> is that of lines
# which name none. The launches of a family read the same lines for the planner's list.
function(moegemm_add_generation target generation arch)
  cmake_parse_arguments(PARSE_ARGV 3 instances "EXACT" "" "TOGETHER")
  file(GLOB host CONFIGURE_DEPENDS ${generation}/*.cpp)
  file(GLOB launches CONFIGURE_DEPENDS ${generation}/*.cu ${generation}/*/*.cu)
  target_sources(${target} PRIVATE ${host})
  moegemm_tell_cuda(${target} ${host})
  moegemm_gencode(of_launches ${arch} ${instances_EXACT})
  moegemm_add_cuda_sources(${target} of_launches ${launches})
  set(list ${CMAKE_CURRENT_SOURCE_DIR}/instances/${generation}.inc)
  set(formats ${CMAKE_CURRENT_SOURCE_DIR}/device/element.cuh)
  set(generator ${PROJECT_SOURCE_DIR}/cmake/instances.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list} ${formats} ${generator})
  set(options --arch=${arch})
  if(instances_EXACT)
    list(APPEND options --exact)
  endif()
  if(instances_TOGETHER)
    string(REPLACE ";" "," together "${instances_TOGETHER}")
    list(APPEND options --together=${together})
  endif()
  execute_process(COMMAND ${Python3_EXECUTABLE} ${generator} --list=${list} --formats=${formats}
    --folder=${CMAKE_CURRENT_BINARY_DIR}/instances ${options}
    OUTPUT_VARIABLE units COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" units "${units}")
  foreach(unit IN LISTS units)
    string(REGEX MATCH "^(.*) ([0-9]+) (TRUE|FALSE)$" matched "${unit}")
    moegemm_gencode(of_unit ${CMAKE_MATCH_2} ${CMAKE_MATCH_3})
    moegemm_add_cuda_sources(${target} of_unit ${CMAKE_MATCH_1})
  endforeach()
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
