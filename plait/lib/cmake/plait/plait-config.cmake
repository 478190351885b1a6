# find_package(plait): the targets plait::torch, with which a C++ program runs packages (plait/package.h), and plait::core,
# with which it launches Triton kernels (plait/triton.h) and which needs no torch: COMPONENTS core asks for it alone.
#
# torch is the one that the Python beside plait has: PLAIT_TORCH_DIR names its folder, or PLAIT_PYTHON a Python to ask.
# TorchConfig.cmake is not read: that of a CUDA build insists on a CUDA toolkit, and no CUDA header is needed here.
get_filename_component(_plait "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET plait::core)
  add_library(plait::core SHARED IMPORTED)
  set_target_properties(plait::core PROPERTIES
    IMPORTED_LOCATION "${_plait}/lib/libplait_core.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_plait}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
if(TARGET plait::torch OR plait_FIND_COMPONENTS STREQUAL "core")
  return()
endif()

# Installed, plait lies beside torch.
if(NOT PLAIT_TORCH_DIR AND EXISTS "${_plait}/../torch/lib/libtorch_cpu.so")
  get_filename_component(PLAIT_TORCH_DIR "${_plait}/../torch" ABSOLUTE)
endif()
if(NOT PLAIT_TORCH_DIR)
  find_program(PLAIT_PYTHON NAMES python3 python)
  # find_spec finds torch without paying for its import.
  execute_process(
    COMMAND "${PLAIT_PYTHON}" -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE PLAIT_TORCH_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET)
endif()
foreach(_name torch_cpu c10)
  if(NOT EXISTS "${PLAIT_TORCH_DIR}/lib/lib${_name}.so")
    set(plait_FOUND FALSE)
    set(plait_NOT_FOUND_MESSAGE "no torch in '${PLAIT_TORCH_DIR}': set PLAIT_TORCH_DIR to the folder of torch, or PLAIT_PYTHON to a Python that has it")
    return()
  endif()
endforeach()

add_library(plait::torch SHARED IMPORTED)
set_target_properties(plait::torch PROPERTIES
  IMPORTED_LOCATION "${_plait}/lib/libplait.so"
  INTERFACE_INCLUDE_DIRECTORIES "${_plait}/include;${PLAIT_TORCH_DIR}/include"
  INTERFACE_COMPILE_FEATURES cxx_std_20
  INTERFACE_LINK_LIBRARIES "${PLAIT_TORCH_DIR}/lib/libtorch_cpu.so;${PLAIT_TORCH_DIR}/lib/libc10.so")
