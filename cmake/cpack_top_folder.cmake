# Read by `cpack` once for each kind of package. A tarball has one folder at its top; the top of a Debian package is the
# root of the system.
if(CPACK_GENERATOR STREQUAL "TGZ")
  set(CPACK_COMPONENT_INCLUDE_TOPLEVEL_DIRECTORY ON)
endif()
