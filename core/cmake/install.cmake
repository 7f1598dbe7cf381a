# What a C++ program finds with find_package(telegrad [COMPONENTS ucx mpi]): libraries, the headers <telegrad/…>, and a
# package that looks for what they need. Each component is a set of targets of its own.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/telegrad)
set(public_headers communicator errors sparse_vector telegrad work)

# Installs a component: its targets, as telegrad::NAME …
function(telegrad_component component)
  install(TARGETS ${ARGN} EXPORT telegrad-${component} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT telegrad-${component} NAMESPACE telegrad:: FILE telegrad-${component}.cmake
    DESTINATION ${package_folder})
endfunction()

telegrad_component(core telegrad)
set(telegrad_ucx_found_in "")
if(TARGET telegrad_ucx)
  list(APPEND public_headers ucx)
  set_target_properties(telegrad_ucx PROPERTIES EXPORT_NAME ucx)
  set_target_properties(telegrad_ucx_api PROPERTIES EXPORT_NAME ucx_api)
  telegrad_component(ucx telegrad_ucx telegrad_ucx_api)
  if(ucx_FOUND)  # else pkg-config has found it
    set(telegrad_ucx_found_in "${ucx_DIR}")
  endif()
endif()

if(TARGET telegrad_mpi)
  list(APPEND public_headers mpi)
  # A program's own find_package(MPI) says where MPI is, and which: the one that telegrad was built with.
  set_target_properties(telegrad_mpi PROPERTIES EXPORT_NAME mpi)
  telegrad_component(mpi telegrad_mpi)
endif()

list(TRANSFORM public_headers PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/api/telegrad/")
list(TRANSFORM public_headers APPEND ".hpp")
install(FILES ${public_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/telegrad)
# Public headers say "base/types.hpp", which a compiler looks for beside them first.
install(FILES "${CMAKE_CURRENT_SOURCE_DIR}/base/types.hpp" "${CMAKE_CURRENT_SOURCE_DIR}/base/given_reduction.hpp"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/telegrad/base)

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/telegradConfig.cmake.in"
  "${CMAKE_CURRENT_BINARY_DIR}/telegradConfig.cmake" INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/telegradConfigVersion.cmake"
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/telegradConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/telegradConfigVersion.cmake"
  DESTINATION ${package_folder})
