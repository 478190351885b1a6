# What plait and triton_launch, each built alone or with the other, have in common: options, flags,
# the CUDA driver, torch, and how a library for C++ programs is made.
include_guard(GLOBAL)

option(PLAIT_EXTENSION "build the module for Python, and install what lies beside it" OFF)
option(PLAIT_TORCH "build what needs torch: plait::torch and plait::ops" ${PLAIT_EXTENSION})
option(PLAIT_INSTALL "install plait where the outer project installs itself"
       ${PROJECT_IS_TOP_LEVEL})

# Inside another project these are its business.
if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  endif()
  set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

get_filename_component(PLAIT_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(PLAIT_CMAKE "${PLAIT_ROOT}/plait/lib/cmake/plait")

if(PLAIT_EXTENSION)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
  set(PLAIT_PYTHON "${Python_EXECUTABLE}")
endif()
if(PLAIT_EXTENSION OR PLAIT_TORCH)
  include("${PLAIT_CMAKE}/plait-torch.cmake")
  if(NOT TARGET plait::libtorch)
    message(FATAL_ERROR "plait is built against an installed torch: ${PLAIT_TORCH_MISSING}. "
                        "For Python, install torch first, then plait with: "
                        "pip install --no-build-isolation .")
  endif()
  # The one libstdc++ that torch throws its exceptions through. Named outright, it comes before a
  # static copy that some compilers put on every command line: with two copies in a process, an
  # exception that crosses them ends it.
  add_library(plait_stdcxx INTERFACE)
  find_library(PLAIT_STDCXX NAMES libstdc++.so.6)
  if(PLAIT_STDCXX)
    target_link_libraries(plait_stdcxx INTERFACE "${PLAIT_STDCXX}")
  endif()
  # A program may know nothing of torch's folder, which lies beside that of plait's Python.
  if(PLAIT_EXTENSION)
    set(PLAIT_TORCH_RPATH "$ORIGIN/../../torch/lib")
  else()
    set(PLAIT_TORCH_RPATH "${PLAIT_TORCH_DIR}/lib")
  endif()
endif()

set(PLAIT_INCLUDES "${PLAIT_ROOT}/plait/include" "${PLAIT_ROOT}/triton_launch/include")
add_library(plait_common INTERFACE)
target_include_directories(plait_common INTERFACE "${PLAIT_ROOT}/native" ${PLAIT_INCLUDES})
target_compile_options(plait_common INTERFACE -Wall -Wextra -Wno-unused-parameter
  -Wno-missing-field-initializers)
target_link_libraries(plait_common INTERFACE ${CMAKE_DL_LIBS})

# Of native/core, what launches GPU kernels.
file(GLOB PLAIT_DRIVER CONFIGURE_DEPENDS "${PLAIT_ROOT}/native/core/drivers/*.cpp")
list(APPEND PLAIT_DRIVER "${PLAIT_ROOT}/native/core/cuda.cpp"
  "${PLAIT_ROOT}/native/core/cubins.cpp")
add_library(plait_native_driver OBJECT ${PLAIT_DRIVER})
target_link_libraries(plait_native_driver PUBLIC plait_common)

# A library for C++ programs: plait::NAME, which is LIBRARY. Installed, it lies beside plait's
# Python or in a prefix of its own.
function(plait_library name library)
  add_library(${library} SHARED)
  add_library(plait::${name} ALIAS ${library})
  target_link_libraries(${library} PRIVATE ${ARGN})
  target_include_directories(${library} INTERFACE ${PLAIT_INCLUDES})
  target_compile_features(${library} INTERFACE cxx_std_20)
  set_target_properties(${library} PROPERTIES LINKER_LANGUAGE CXX)
  if(PLAIT_INSTALL)
    install(TARGETS ${library} LIBRARY DESTINATION "$<IF:$<BOOL:${PLAIT_EXTENSION}>,plait/lib,lib>")
  endif()
endfunction()

# What a wheel has from the source tree, as a prefix of C++ programs has it.
if(PLAIT_INSTALL AND NOT PLAIT_EXTENSION)
  include("${PLAIT_CMAKE}/plait-config-version.cmake")
  include(CMakePackageConfigHelpers)
  write_basic_package_version_file(plait-config-version.cmake VERSION ${PACKAGE_VERSION}
                                   COMPATIBILITY AnyNewerVersion)
  foreach(folder IN LISTS PLAIT_INCLUDES)
    install(DIRECTORY "${folder}/plait" DESTINATION include)
  endforeach()
  install(FILES "${PLAIT_CMAKE}/plait-config.cmake" "${PLAIT_CMAKE}/plait-torch.cmake"
                "${CMAKE_CURRENT_BINARY_DIR}/plait-config-version.cmake"
          DESTINATION lib/cmake/plait)
  if(PLAIT_TORCH)
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/plait-built-with.cmake"
         "if(NOT PLAIT_TORCH_DIR)\n  set(PLAIT_TORCH_DIR \"${PLAIT_TORCH_DIR}\")\nendif()\n")
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/plait-built-with.cmake" DESTINATION lib/cmake/plait)
  endif()
endif()
