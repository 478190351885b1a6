"""Random kernels of a fixed list of seeds, on every instruction set. See tests/fuzz_kernels.py for
how to look for more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from plait.runtime.toolchain import Isa
from tests.fuzz_kernels import Maker, check, compare, repro
from tests.kernel_tools import Loaded, usable_isas


@pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
@pytest.mark.parametrize("first", [1000, 2000])
def test_random_kernels(isa: Isa, first: int, tmp_path: Path) -> None:
    makers = {seed: Maker(seed) for seed in range(first, first + 40)}
    kernels = {
        seed: dataclasses.replace(m.kernel(), name=f"fuzz_{seed}") for seed, m in makers.items()
    }
    loaded = Loaded(list(kernels.values()), isa, tmp_path, opt_level=1)
    wrong = []
    for seed, maker in makers.items():
        for threads in (1, 3):
            text = compare(kernels[seed], maker, loaded, threads)
            if text:
                wrong.append(f"# seed {seed}: {text[:300]!r}\n{repro(seed, isa.name, threads)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", [275, 421, 481, 20041])
def test_seeds_that_failed_once(seed: int, tmp_path: Path) -> None:
    for isa in usable_isas():
        assert check(seed, isa, tmp_path, threads=2) == ""


@pytest.mark.parametrize("seed", range(3000, 3012))
def test_a_repro_runs_the_same_kernel_again(
    seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = repro(seed, usable_isas()[0].name, threads=2)
    exec(compile(program, "repro.py", "exec"), {})
    assert capsys.readouterr().out == "as the reference\n"

    compared: list[tuple[object, ...]] = []

    def disagree(kernel: object, given: Maker, loaded: object, threads: int) -> str:
        compared.append((kernel, given.arrays, given.dynamic, given.exact_of, threads))
        return "a difference"

    monkeypatch.setattr("tests.fuzz_kernels.compare", disagree)
    with pytest.raises(AssertionError, match="a difference"):
        exec(compile(program, "repro.py", "exec"), {})
    maker = Maker(seed)
    ((kernel, arrays, sizes, exact, threads),) = compared
    assert (kernel, sizes, exact, threads) == (maker.kernel(), maker.dynamic, maker.exact_of, 2)
    assert isinstance(arrays, dict) and arrays.keys() == maker.arrays.keys()
    for name, x in maker.arrays.items():
        assert arrays[name].dtype == x.dtype and arrays[name].tobytes() == x.tobytes()
