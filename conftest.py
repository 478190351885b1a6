"""Every test: IR verified between passes, errors raised where eager could run the graph, kernels
cached below pytest's own cache, Dynamo forgotten, one seed, for what files make when they are
imported too."""

from __future__ import annotations

import gc
import logging
import os

# Before torch loads OpenMP: threads that wait in a loop take the processors from the other
# processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import zlib
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from plait.capture import dynamo
from plait.capture.recompiles import of_process
from plait.compat.frames import guards_unmeasured
from plait.runtime import cubin_pool
from plait.wrapper.program import Program
from tests import other_torch

if torch.cuda.is_available():  # float64 is the judge of float32: nothing rounds to TF32 unasked
    torch.backends.cudnn.allow_tf32 = False
collect_ignore_glob = [] if torch.cuda.is_available() else ["*/test_gpu*.py"]


SAMPLED = {
    "test_argument_orders.py::test_any_order": 2,
    "test_batched_gradients.py::test_retained_graphs": 2,
    "test_capture_export.py::test_results_in_inputs_that_are_written": 4,
    "test_capture_export.py::test_views_where_the_example_has_copies_are_seen": 4,
    "test_capture_inputs.py::test_a_change_reaches_a_lazy_input_once": 3,
    "test_capture_memory_format.py::test_batches_of_any_size": 3,
    "test_capture_memory_format.py::test_models": 3,
    "test_capture_random.py::test_wrong_parameters": 3,
    "test_checkpoints.py::test_random_numbers_are_those_of_the_forward_pass": 2,
    "test_control_flow.py::test_every_target_runs_it": 3,
    "test_control_flow.py::test_gradients_go_through_a_loop": 3,
    "test_cubin.py::test_pool": 3,
    "test_cuda_programs.py::test_16_bits_are_half_of_32": 3,
    "test_extremes.py::test_casts_to_integers_wrap_at_every_size": 3,
    "test_extremes.py::test_division_of_integers_by_zero_is_eagers_error": 2,
    "test_extremes.py::test_sums_of_negative_zeros": 2,
    "test_facts.py::test_all_targets": 5,
    "test_facts.py::test_bound_programs": 6,
    "test_facts.py::test_compiled_functions": 4,
    "test_facts.py::test_small_sizes": 2,
    "test_fits.py::test_dtypes_and_sizes_of_results_are_eagers": 5,
    "test_fits.py::test_numbers_beside_tensors_are_refused_or_promoted_as_eager_does": 5,
    "test_fits.py::test_what_does_not_fit_is_refused_as_eager_refuses_it": 5,
    "test_flex_attention.py::test_as_eager": 4,
    "test_flex_attention.py::test_random_formulas": 20,
    "test_float8.py::test_every_code_is_read_as_eager_reads_it": 2,
    "test_float8.py::test_numbers_are_rounded_as_eager_rounds_them": 2,
    "test_float8.py::test_operators": 10,
    "test_foreach.py::test_foreach": 3,
    "test_freeze.py::test_attention": 2,
    "test_freeze.py::test_convolution": 4,
    "test_freeze.py::test_winograd": 4,
    "test_frontend_cases.py::test_dynamic": 10,
    "test_frontend_cases.py::test_dynamic_training": 5,
    "test_frontend_cases.py::test_inference": 3,
    "test_frontend_cases.py::test_training": 5,
    "test_frontend_direct.py::test_views_of_inputs_are_eagers": 4,
    "test_frontend_dynamic.py::test_checks_of_a_size_that_becomes_a_number": 4,
    "test_frontend_dynamic.py::test_one_compile_serves_all_sizes": 7,
    "test_frontend_dynamic.py::test_one_compile_serves_all_sizes_in_training": 4,
    "test_fused_steps.py::test_steps": 4,
    "test_fuzz_graphs.py::test_random_control_flow": 6,
    "test_fuzz_graphs.py::test_random_graphs": 12,
    "test_fuzz_graphs.py::test_random_networks": 4,
    "test_half_numbers.py::test_python_numbers": 2,
    "test_half_numbers.py::test_tensors_that_hold_a_number": 5,
    "test_indices_of_nothing.py::test_gradients": 4,
    "test_indices_of_nothing.py::test_sizes_of_0": 4,
    "test_indices_of_nothing.py::test_sizes_that_become_0": 9,
    "test_indices_of_nothing.py::test_targets": 2,
    "test_interpreted.py::test_sample_builds": 2,
    "test_interruptions.py::test_no_memory_in_the_middle_of_a_compile": 2,
    "test_ir_text.py::test_models_read_back": 2,
    "test_jagged.py::test_padded": 2,
    "test_kernel_access.py::test_masks_of_positions": 2,
    "test_ladder.py::test_a_size_without_expression_is_guarded": 2,
    "test_ladder.py::test_a_stage_that_fails_leaves_the_graph_to_eager": 4,
    "test_ladder.py::test_training_whose_graphs_are_left_to_eager": 8,
    "test_lower_conv.py::test_depthwise": 2,
    "test_lower_moved.py::test_masked_scatter": 2,
    "test_lower_pool.py::test_windows_beyond_the_input": 4,
    "test_lower_programs.py::test_split_at_indices_that_a_tensor_holds": 2,
    "test_lower_resample.py::test_planes": 2,
    "test_margins.py::test_multi_margin_loss": 5,
    "test_margins.py::test_multilabel_margin_loss": 2,
    "test_memory.py::test_peak": 2,
    "test_metadata.py::test_gradients_of_views_of_elements_that_share_memory": 2,
    "test_metadata.py::test_larger_elements_of_an_input_that_begins_between_two": 6,
    "test_metadata.py::test_lazily_conjugated_results_have_their_values": 6,
    "test_metadata.py::test_numbers_that_decide_where_results_lie": 7,
    "test_metadata.py::test_of_compiled_functions": 18,
    "test_metadata.py::test_of_packages": 2,
    "test_metadata.py::test_of_programs_without_dynamo": 3,
    "test_metadata.py::test_of_training": 6,
    "test_metadata.py::test_results_in_the_order_of_eagers_kernels_have_gradients": 5,
    "test_metadata.py::test_results_lie_in_the_order_of_eagers_kernels": 4,
    "test_metadata.py::test_views_of_copies_that_begin_at_a_found_number": 7,
    "test_metadata.py::test_views_of_values_with_known_factors_in_their_strides": 4,
    "test_models.py::test_dynamic_batch": 2,
    "test_models.py::test_training_step": 2,
    "test_mutants.py::test_the_fuzzer_finds": 8,
    "test_native_fuzz.py::test_random_programs": 4,
    "test_native_training.py::test_compiled_autograd_runs_the_backward_program": 8,
    "test_native_training.py::test_jagged_nested_tensors": 4,
    "test_native_training.py::test_models_are_native": 7,
    "test_native_training.py::test_sizes_that_tracing_finds_constant": 3,
    "test_norms_of_constants.py::test_forward": 3,
    "test_opinfo.py::test_dynamic": 12,
    "test_opinfo.py::test_forward": 30,
    "test_opinfo.py::test_gradient": 18,
    "test_ops.py::test_against_float64": 2,
    "test_optimizers.py::test_multiply_add": 5,
    "test_optimizers.py::test_optimizer": 6,
    "test_optimizers.py::test_special_options": 3,
    "test_package_control.py::test_packages_agree_with_compile": 2,
    "test_package_gpu.py::test_package_for_gpus": 2,
    "test_purity.py::test_nothing_forbidden_is_loaded": 2,
    "test_quantised.py::test_kernels_on_a_gpu": 2,
    "test_recipes.py::test_recipe": 3,
    "test_refuse.py::test_error_inputs_are_refused_alike": 2,
    "test_refuse.py::test_programs_are_refused_when_they_are_compiled": 2,
    "test_refuse.py::test_programs_that_eager_runs_are_run": 2,
    "test_run_checks.py::test_conditions_of_values_without_dynamo": 2,
    "test_run_checks.py::test_extremum_of_nothing": 2,
    "test_run_checks.py::test_values_of_another_size_are_refused": 3,
    "test_size_functions.py::test_in_functions_whose_sizes_change": 3,
    "test_stores.py::test_cells": 3,
    "test_stores.py::test_gradients_of_programs": 5,
    "test_stores.py::test_programs": 24,
    "test_transforms.py::test_transforms": 4,
    "test_triton_kernels.py::test_random_kernels_compile": 2,
    "test_wrapper_checks.py::test_good_models_pass": 2,
    "test_wrapper_fx.py::test_graphs_do_what_the_reference_does": 5,
    "test_wrapper_fx.py::test_peak": 2,
    "test_wrapper_python.py::test_inference": 3,
    "test_wrapper_same.py::test_calls": 3,
    "test_wrapper_same.py::test_models_have_the_bits_of_native": 3,
    "test_wrapper_targets.py::test_passes_keep_the_meaning": 2,
    "test_wrapper_targets.py::test_target_does_what_the_reference_does": 2,
    "test_wrapper_text.py::test_every_instruction_reads_back": 3,
}
"""Tests of many cases: one case in so many, by the checksum of its name, runs every day; the others
are slow."""

BY_TURNS = {
    "test_batched_gradients.py::test_batched": 2,
    "test_batched_gradients.py::test_forward_mode_over_a_backward_pass": 2,
    "test_batched_gradients.py::test_gradcheck": 2,
    "test_batched_gradients.py::test_it_is_told_once_and_recorded": 2,
    "test_batched_gradients.py::test_jacobian": 2,
    "test_batched_gradients.py::test_mutated_inputs": 2,
    "test_batched_gradients.py::test_random_operators": 2,
    "test_batched_gradients.py::test_several_results": 2,
    "test_batched_gradients.py::test_subclass_inputs": 2,
    "test_batch_invariance.py::test_loops": 2,
    "test_batch_invariance.py::test_products": 2,
    "test_batches.py::test_mixed_sizes": 2,
    "test_capture_biases.py::test_results_are_saved_without_their_biases": 2,
    "test_capture_inputs.py::test_plait_compile_returns_views_of_inputs": 2,
    "test_capture_inputs.py::test_views_of_a_lazy_input_lie_in_it": 2,
    "test_capture_loss.py::test_log_softmax_is_made_again": 3,
    "test_capture_norm_results.py::test_groups": 2,
    "test_capture_norm_results.py::test_only_what_the_norm_reads_and_the_convolution_is_saved": 2,
    "test_control_flow.py::test_associative_scans_of_varying_length": 2,
    "test_control_flow.py::test_every_target_runs_it": 2,
    "test_control_flow.py::test_gradients_go_through_a_branch": 2,
    "test_control_flow.py::test_gradients_go_through_a_branch_on_a_size": 2,
    "test_control_flow.py::test_what_is_no_subprogram_runs_as_python_and_says_why": 2,
    "test_facts.py::test_a_bool_that_is_found_in_training": 2,
    "test_facts.py::test_a_found_size_of_1_is_not_squeezed_as_another": 2,
    "test_facts.py::test_a_size_that_is_a_stride_in_the_example": 2,
    "test_facts.py::test_strides_that_are_equal_in_the_example_only": 2,
    "test_facts.py::test_strides_that_vary_are_checked": 2,
    "test_facts.py::test_the_error_says_what_was_found_and_where": 2,
    "test_fits.py::test_memory_is_looked_at_for_sizes_that_vary": 3,
    "test_flex_attention.py::test_every_target": 3,
    "test_foreach.py::test_a_list_among_results": 2,
    "test_forward_mode.py::test_tangents_go_through": 2,
    "test_freeze.py::test_rows_are_passed_on_where_nothing_else_reads_them": 2,
    "test_frontend_cases.py::test_tensor_subclass_of_one_tensor": 2,
    "test_growth.py::test_twice_the_graph_is_twice_the_work": 2,
    "test_indices_of_nothing.py::test_of_two_operators_in_one_kernel": 2,
    "test_jagged.py::test_jagged": 2,
    "test_kernel_fuzz.py::test_random_kernels": 2,
    "test_kernel_nests.py::test_scans": 3,
    "test_kernel_nests.py::test_threads_share_scatters_where_points_stay_apart": 2,
    "test_lower_resample.py::test_planes": 2,
    "test_metadata.py::test_a_value_written_at_a_found_place_has_memory_of_its_own": 2,
    "test_metadata.py::test_gradients_of_views_at_one_place_of_varying_sizes": 2,
    "test_metadata.py::test_operators_do_not_write_what_is_read_as_another_type": 2,
    "test_metadata.py::test_results_lie_in_the_order_of_eagers_kernels": 2,
    "test_metadata.py::test_views_of_a_copy_that_the_example_alone_packs": 2,
    "test_metadata.py::test_views_of_found_sizes_share_memory": 2,
    "test_native_training.py::test_sizes_that_tracing_finds_constant": 2,
    "test_numerics.py::test_models_have_eagers_bits": 2,
    "test_package_control.py::test_packages_agree_with_compile": 2,
    "test_replaced.py::test_torch_compile_sees_every_change": 2,
    "test_replaced.py::test_what_is_put_in_the_place_of_a_tensor_counts": 2,
    "test_shared_offsets.py::test_as_eager": 2,
    "test_size_functions.py::test_in_functions_whose_sizes_change": 2,
    "test_size_functions.py::test_numbers_of_kernels_that_need_more_than_64_bits": 2,
    "test_split_readers.py::test_as_eager": 2,
}
"""Tests over several lists, as cases and targets: of their combinations one in so many runs every
day, by turns, so that all values of every list are met; the others are slow. Of a test over one
list, as the four targets, its name says which values run: the next test meets others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places: dict[tuple[str, str], dict[int, int]] = {}
    """(test, parameter) -> a value's identity -> how many came before it."""
    for item in items:
        name = item.nodeid.partition("[")[0].rpartition("/")[2]
        every = SAMPLED.get(name)
        if every is not None and (zlib.crc32(item.name.encode()) >> 8) % every:
            item.add_marker(pytest.mark.slow)
        if name in BY_TURNS:
            assert isinstance(item, pytest.Function)
            turn = zlib.crc32(name.encode()) >> 8
            for argument, value in item.callspec.params.items():
                met = places.setdefault((name, argument), {})
                turn += met.setdefault(id(value), len(met))
            if turn % BY_TURNS[name]:
                item.add_marker(pytest.mark.slow)
    other_torch.skip(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and listed stays: nothing of it is garbage, and collections of garbage need
    not look at it. Each test leaves graphs behind: ten times as many objects as Python would wait
    for may gather before one looks. All objects are looked at after a hundred others, of which each
    frame that Dynamo compiles is one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(7_000, 10, 100)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PLAIT_VERIFY", "1")
    os.environ.setdefault("PLAIT_WARM_START", "0")  # what is tested is compiled
    os.environ.setdefault(
        "PLAIT_STRICT", "1"
    )  # what leaves the kernels for eager fails; tests of the ladder unset it
    assert config.cache is not None
    folder = str(config.cache.mkdir("plait"))
    os.environ.setdefault("PLAIT_CACHE_DIR", folder)
    os.environ.setdefault("PLAIT_TRUST", folder)  # wherever the tree lies
    # pytest listens to loggers that do not propagate, and torch prints every graph if one listens.
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.addHandler = lambda hdlr: None  # type: ignore[method-assign]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Tensors that a file makes when it is imported are the same in every run."""
    _seed()


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    """The entry point gives torch the name "plait"; a tree that was never installed registers it by
    hand."""
    import torch._dynamo.backends.registry as registry

    if "plait" not in registry.list_backends(exclude_tags=()):
        from plait.capture.backend import plait_backend

        registry.register_backend(plait_backend, name="plait")
    if "PYTEST_XDIST_WORKER" in os.environ:
        cubin_pool.MAX_WORKERS = 1  # every process of the tests has a pool of its own


@pytest.fixture(scope="session", autouse=True)
def _unmeasured() -> Iterator[None]:
    """plait has Dynamo leave this out where it compiles; here other backends do without it, too."""
    with guards_unmeasured():
        yield


def _seed() -> None:
    """torch.manual_seed, which writes the stack down for each kind of device that is not there."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """A function that Dynamo compiled too often would run in eager, and be compared with itself: an
    error here. No test leaves gradients off for others."""
    torch._dynamo.reset()
    dynamo.left_to_eager.clear()
    of_process.found.clear()
    _seed()
    with torch.enable_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()  # tests in other processes need memory too
        torch.cuda.empty_cache()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs compiled while the test runs."""
    import plait.capture.program as module

    made: list[Program] = []
    compile_graph = module.compile_graph

    def noted(*args: Any, **kwargs: Any) -> Program:
        made.append(compile_graph(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(module, "compile_graph", noted)
    return made
