# find_package(plait): the targets plait::core, with which a C or C++ program launches Triton kernels (plait/triton.h,
# plait/triton_c.h) and which needs neither torch nor Python, and plait::torch, with which it also runs packages
# (plait/package.h), and plait::ops, operators for torch (plait/ops.h). COMPONENTS core asks for the first alone; plait-torch.cmake finds torch.
get_filename_component(_plait "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

# The target plait::NAME, where this installation has its library.
macro(_plait_library name library)
  if(NOT TARGET plait::${name} AND EXISTS "${_plait}/lib/lib${library}.so")
    add_library(plait::${name} SHARED IMPORTED)
    set_target_properties(plait::${name} PROPERTIES
      IMPORTED_LOCATION "${_plait}/lib/lib${library}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${_plait}/include")
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
if(NOT plait_FIND_COMPONENTS STREQUAL "core" AND EXISTS "${_plait}/lib/libplait.so")
  # Beside Python's plait lies its torch.
  if(NOT PLAIT_TORCH_DIR AND EXISTS "${_plait}/../torch/lib/libtorch_cpu.so")
    get_filename_component(PLAIT_TORCH_DIR "${_plait}/../torch" ABSOLUTE)
  endif()
  include("${CMAKE_CURRENT_LIST_DIR}/plait-torch.cmake")
  if(NOT TARGET plait::libtorch)
    set(plait_FOUND FALSE)
    set(plait_NOT_FOUND_MESSAGE "${PLAIT_TORCH_MISSING}")
    return()
  endif()
  _plait_library(torch plait)
  _plait_library(ops plait_ops)
  foreach(_name torch ops)
    set_property(TARGET plait::${_name} APPEND PROPERTY INTERFACE_LINK_LIBRARIES plait::libtorch)
  endforeach()
endif()

foreach(_name IN LISTS plait_FIND_COMPONENTS)
  if(plait_FIND_REQUIRED_${_name} AND NOT plait_${_name}_FOUND)
    set(plait_FOUND FALSE)
    set(plait_NOT_FOUND_MESSAGE "this plait has no ${_name}")
  endif()
endforeach()
