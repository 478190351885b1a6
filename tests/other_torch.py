"""Tests that fail by a fault of torch before 2.13, or that a CUDA build of torch cannot run on a
machine without a GPU.

Names are the starts of tests' names. What a GPU's own tests need of torch they ask for themselves.
"""

from __future__ import annotations

import pytest
import torch

from plait import compat

_OLDER = {
    "test_extremes.py::test_one_argument[torch.float32]": "eager's fraction of -0. is 0. there",
    "test_first_compiles.py::test_eight_threads_compile_first": (
        "Dynamo crashes in a forked child, with aot_eager too"
    ),
    "test_fits.py::test_dtypes_and_sizes_of_results_are_eagers[a weight that fits]": (
        "fake tensors refuse it"
    ),
    "test_fits.py::test_dtypes_and_sizes_of_results_are_eagers[binary_cross_entropy]": (
        "fake tensors refuse it"
    ),
    "test_fits.py::test_what_does_not_fit_is_refused_as_eager_refuses_it[diagonal_scatter]": (
        "Dynamo's own error"
    ),
    "test_fits.py::test_what_does_not_fit_is_refused_as_eager_refuses_it[log_softmax]": (
        "Dynamo's own error"
    ),
    "test_lower_programs.py::test_vector_norms_of_a_varying_number_of_elements": (
        "tracing asks whether a found size is 1"
    ),
    "test_opinfo.py::test_dynamic[histogram]": "the operator has no fake implementation",
    "test_optimizers.py::test_multiply_add[addc": "eager rounds half types after each step",
    "test_optimizers.py::test_optimizer[Adafactor-foreach]": "the optimiser fails by itself",
    "test_package.py::test_a_package_for_a_device_that_is_not_here[gru]": (
        "tracing asks a fake tensor for its memory"
    ),
    "test_package_control.py::test_python_is_refused_by_name_and_line": (
        "tracing refuses generators first"
    ),
    "test_run_checks.py::test_parts_that_are_not_there": "Dynamo's own error",
    "test_size_functions.py::test_in_functions_whose_sizes_change[shifts": (
        "Dynamo cannot shift a size"
    ),
    "test_size_functions.py::test_in_other_targets": "Dynamo cannot shift a size",
    "test_sizes_left_out.py::test_a_part_may_be_all[reshaped inside]": (
        "tracing fixes the size of what is reshaped"
    ),
    "test_streams.py::test_as_torch_compile_brings_it": "its operators of streams are others",
    "test_streams.py::test_tensors_that_are_kept_for_a_stream_live_that_long": (
        "its operators of streams are others"
    ),
    "test_wrapper_fx.py::test_symbols_are_placeholders_with_hints_and_assertions_stay": (
        "its clean-up drops assertions"
    ),
    "test_wrapper_fx.py::test_triton_kernels_are_in_the_graph": (
        "its clean-up drops launches of Triton kernels"
    ),
}
_WITHOUT_A_DRIVER = {
    "test_cuda_programs.py::test_the_file_of_cubins_is_checked": "the driver is looked for first",
    "test_cuda_programs.py::test_without_a_gpu_loading_says_so": "the program is loaded for a GPU",
    "test_ops_interpreted.py::test_operators": "a made-up GPU cannot take the place of torch's",
    "test_tune.py::test_a_kernel_for_python_needs_its_device": "the driver is looked for first",
}


def skip(items: list[pytest.Item]) -> None:
    """Marks the tests that this torch cannot run, with the reason."""
    known = dict(_OLDER) if compat.versions.BEFORE_2_13 else {}
    if torch.version.cuda is not None and not torch.cuda.is_available():
        known |= _WITHOUT_A_DRIVER
    for item in items if known else ():
        name = item.nodeid.rpartition("/")[2]
        for start in (k for k in known if name.startswith(k)):
            item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__}: {known[start]}"))
