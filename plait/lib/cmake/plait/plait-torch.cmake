# The target plait::libtorch: headers and libraries of the torch in the folder PLAIT_TORCH_DIR, else of the one that
# find_package(Torch) found before, else of the one that the Python PLAIT_PYTHON has. Where there is none, PLAIT_TORCH_MISSING
# says so. TorchConfig.cmake is not read: that of a CUDA build insists on a CUDA toolkit, and no CUDA header is needed here.
if(TARGET plait::libtorch)
  return()
endif()
if(NOT PLAIT_TORCH_DIR)
  set(PLAIT_TORCH_DIR "${TORCH_INSTALL_PREFIX}")
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
    set(PLAIT_TORCH_MISSING "no torch in '${PLAIT_TORCH_DIR}': set PLAIT_TORCH_DIR to the folder of torch, or PLAIT_PYTHON to a Python that has it")
    return()
  endif()
endforeach()

add_library(plait::libtorch INTERFACE IMPORTED GLOBAL)
set_target_properties(plait::libtorch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${PLAIT_TORCH_DIR}/include;${PLAIT_TORCH_DIR}/include/torch/csrc/api/include"
  INTERFACE_LINK_LIBRARIES "${PLAIT_TORCH_DIR}/lib/libtorch_cpu.so;${PLAIT_TORCH_DIR}/lib/libc10.so")
