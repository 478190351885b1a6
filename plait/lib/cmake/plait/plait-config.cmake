# find_package(plait): the targets plait::core, with which a C or C++ program launches Triton kernels (plait/triton.h,
# plait/triton_c.h) and which needs neither torch nor Python; plait::torch, with which it also runs packages
# (plait/package.h); and plait::ops, operators for torch (plait/ops.h). COMPONENTS core asks for the first alone;
# plait-torch.cmake finds torch.
get_filename_component(_plait "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
# Beside Python's plait lies triton_launch; a prefix has the headers of both in one folder.
set(_plait_includes "${_plait}/include")
if(EXISTS "${_plait}/__init__.py" AND EXISTS "${_plait}/../triton_launch/include")
  get_filename_component(_plait_launch "${_plait}/../triton_launch/include" ABSOLUTE)
  list(APPEND _plait_includes "${_plait_launch}")
endif()

# The target plait::NAME, where this installation has its library, and what its headers need.
macro(_plait_library name library)
  if(NOT TARGET plait::${name} AND EXISTS "${_plait}/lib/lib${library}.so")
    add_library(plait::${name} SHARED IMPORTED)
    set_target_properties(plait::${name} PROPERTIES
      IMPORTED_LOCATION "${_plait}/lib/lib${library}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${_plait_includes}"
      INTERFACE_LINK_LIBRARIES "${ARGN}")
    get_property(_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
    if("CXX" IN_LIST _languages)
      target_compile_features(plait::${name} INTERFACE cxx_std_20)
    endif()
  endif()
  set(plait_${name}_FOUND FALSE)
  if(TARGET plait::${name})
    set(plait_${name}_FOUND TRUE)
  endif()
endmacro()

_plait_library(core plait_core)
if(NOT plait_FIND_COMPONENTS STREQUAL "core" AND
   (EXISTS "${_plait}/lib/libplait.so" OR EXISTS "${_plait}/lib/libplait_ops.so"))
  # Beside Python's plait lies its torch; a prefix of its own says which one it was built with.
  include("${CMAKE_CURRENT_LIST_DIR}/plait-built-with.cmake" OPTIONAL)
  if(NOT PLAIT_TORCH_DIR AND EXISTS "${_plait}/../torch/lib/libtorch_cpu.so")
    get_filename_component(PLAIT_TORCH_DIR "${_plait}/../torch" ABSOLUTE)
  endif()
  include("${CMAKE_CURRENT_LIST_DIR}/plait-torch.cmake")
  if(NOT TARGET plait::libtorch)
    set(plait_FOUND FALSE)
    set(plait_NOT_FOUND_MESSAGE "${PLAIT_TORCH_MISSING}")
    return()
  endif()
  _plait_library(torch plait plait::libtorch)
  _plait_library(ops plait_ops plait::libtorch)
endif()

foreach(_name IN LISTS plait_FIND_COMPONENTS)
  if(plait_FIND_REQUIRED_${_name} AND NOT plait_${_name}_FOUND)
    set(plait_FOUND FALSE)
    set(plait_NOT_FOUND_MESSAGE "this plait has no ${_name}")
  endif()
endforeach()
