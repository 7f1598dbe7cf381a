# Defines telegrad::ucx_api, what drivers/ucx compiles and links against, from TELEGRAD_UCX = wheel | system.
# A build that brings its own UCX (the Python package) defines the target first and this file leaves it alone.
if(TARGET telegrad::ucx_api)
  return()
endif()
set(telegrad_ucx_minimum 1.15)  # active messages with rendezvous, keepalive, ucp_config_modify as the driver uses them
add_library(telegrad_ucx_api INTERFACE)
add_library(telegrad::ucx_api ALIAS telegrad_ucx_api)

if(TELEGRAD_UCX STREQUAL wheel)
  find_package(ucx ${telegrad_ucx_minimum} CONFIG PATHS "${ucx_ROOT}" NO_DEFAULT_PATH)
  if(NOT ucx_FOUND)
    message(FATAL_ERROR
      "TELEGRAD_UCX=wheel, but ucx_ROOT='${ucx_ROOT}' holds no UCX >= ${telegrad_ucx_minimum}.\n"
      "Install the wheel (pip install libucx-cu12) and pass "
      "-Ducx_ROOT=$(python -c 'import libucx; print(*libucx.__path__)'), "
      "or use -DTELEGRAD_UCX=system, or -DTELEGRAD_UCX=none to build without the ucx driver.")
  endif()
  target_link_libraries(telegrad_ucx_api INTERFACE ucx::ucp ucx::ucs)
elseif(TELEGRAD_UCX STREQUAL system)
  find_package(ucx ${telegrad_ucx_minimum} CONFIG QUIET)
  if(ucx_FOUND)
    target_link_libraries(telegrad_ucx_api INTERFACE ucx::ucp ucx::ucs)
  else()
    find_package(PkgConfig QUIET)
    if(PkgConfig_FOUND)
      pkg_check_modules(system_ucx QUIET IMPORTED_TARGET ucx>=${telegrad_ucx_minimum} ucx-ucs>=${telegrad_ucx_minimum})
    endif()
    if(NOT TARGET PkgConfig::system_ucx)
      message(FATAL_ERROR
        "TELEGRAD_UCX=system, but neither CMake (ucx-config.cmake) nor pkg-config (ucx.pc) finds a UCX >= ${telegrad_ucx_minimum}.\n"
        "Install its development files (libucx-dev of Debian 13, Ubuntu 24.04 or later), "
        "or say where it is with -Ducx_ROOT=PREFIX, "
        "or take that of the wheel libucx-cu12: -DTELEGRAD_UCX=wheel, "
        "with -Ducx_ROOT=$(python -c 'import libucx; print(*libucx.__path__)') where the core is built alone.")
    endif()
    target_link_libraries(telegrad_ucx_api INTERFACE PkgConfig::system_ucx)
  endif()
else()
  message(FATAL_ERROR "TELEGRAD_UCX='${TELEGRAD_UCX}' is not one of wheel, system, none.")
endif()
