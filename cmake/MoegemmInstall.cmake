# What `cmake --install` puts where, so that find_package(moegemm) finds it. Nothing of ours beyond the
# headers and the shared library reaches a consumer: no flags, no CUDA, no object files.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moegemm)
install(TARGETS moegemm EXPORT moegemm-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moegemm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development FILES_MATCHING PATTERN "*.h")
install(EXPORT moegemm-targets NAMESPACE moegemm:: DESTINATION ${package_dir}
  COMPONENT development)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY_LICENSES
  DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/moegemm-config.cmake.in
  ${PROJECT_BINARY_DIR}/moegemm-config.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moegemm-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moegemm-config.cmake
  ${PROJECT_BINARY_DIR}/moegemm-config-version.cmake
  DESTINATION ${package_dir} COMPONENT development)
