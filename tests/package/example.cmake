# Installs the library, moves what was installed, then configures, builds and runs the example
# against it: what a consumer does, on a path that the build never knew.
set(work ${BUILD_DIR}/tests/package)
file(REMOVE_RECURSE ${work}/installed ${work}/prefix ${work}/example)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

foreach(component library development)
  run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/installed --component ${component})
endforeach()
file(RENAME ${work}/installed ${work}/prefix)

file(GLOB_RECURSE package_files ${work}/prefix/*.cmake)
foreach(file IN LISTS package_files)
  file(READ ${file} text)
  foreach(leak IN ITEMS ${BUILD_DIR} cudart moegemm_flags moegemm_objects)
    string(FIND "${text}" "${leak}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "${file} mentions ${leak}, which a consumer does not have")
    endif()
  endforeach()
endforeach()

run(${CMAKE_COMMAND} -S ${EXAMPLE_DIR} -B ${work}/example -G ${GENERATOR}
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/example)
run(${work}/example/moe_layer)
