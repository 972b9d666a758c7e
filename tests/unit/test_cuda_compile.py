"""Every kernel compiles for every architecture that we serve, with both CUDA lines; no GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from gpu.cuda.architectures import WARPGROUP_ARCH
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.programs import source_text
from gpu.cuda.rows import PUBLISH, ROWS
from gpu.cuda.sources import SOURCES
from tests.kernel_sweep import compile_problems, ptxas_complaints, unknown_driver_names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
CUDA12_PYTHON = ROOT / ".venv-cuda12/bin/python"
C_TYPES = {"float": Arg.F32, "i32": Arg.I32, "int": Arg.I32, "u32": Arg.U32, "i64": Arg.I64, "u64": Arg.U64}
SIGNATURE = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(?P<name>\w+)\((?P<parameters>[^)]*)\)'
)


@pytest.fixture
def cubins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps cubins between runs, by source, options and compiler: only what has changed is compiled."""
    assert request.config.cache is not None
    monkeypatch.setenv("KVALET_CUDA_CACHE_DIR", str(request.config.cache.mkdir("cubins")))


def by_file(sources: tuple[KernelSource, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("source", sources, ids=lambda source: source.file)


def c_arguments(parameters: str) -> tuple[Arg, ...]:
    return tuple(
        Arg.POINTER if "*" in declaration else C_TYPES[declaration.split()[0]] for declaration in parameters.split(",")
    )


def test_table_lists_every_source_file_once() -> None:
    files = sorted(path.name for path in resources.files("gpu.kernels").iterdir() if path.name.endswith(".cu"))
    assert sorted(source.file for source in SOURCES) == files


@by_file(SOURCES)
def test_table_says_what_kernels_take(source: KernelSource) -> None:
    declared = {
        match["name"]: c_arguments(match["parameters"]) for match in SIGNATURE.finditer(source_text(source.file))
    }
    assert {kernel.name: kernel.arguments for kernel in source.kernels} == declared


@by_file(SOURCES)
def test_samples_name_every_parameter(source: KernelSource) -> None:
    assert source.samples
    assert all(set(sample) == set(source.parameters) for sample in source.samples)


@pytest.mark.parametrize("arch", ARCHS)
@by_file(SOURCES)
@pytest.mark.usefixtures("cubins")
def test_source_compiles_for_every_architecture(source: KernelSource, arch: str) -> None:
    if arch == WARPGROUP_ARCH:
        assert compile_problems(source, source.samples, arch, in_registers=True) == []
    else:
        # Half of the samples, the other half for the next architecture: a minute less on two cores.
        half = source.samples[ARCHS.index(arch) % 2 :: 2] or source.samples
        assert compile_problems(source, half, arch) == []


def test_driver_names_are_in_the_bindings() -> None:
    assert unknown_driver_names() == []


@pytest.mark.skipif(not CUDA12_PYTHON.exists(), reason="no .venv-cuda12; `make setup-cuda12` creates it")
@pytest.mark.parametrize("words", [("--samples", "3", "sm_70"), ("--samples", "1", "sm_90a")], ids="-".join)
@pytest.mark.usefixtures("cubins")
def test_older_line_compiles(words: tuple[str, ...]) -> None:
    command = [str(CUDA12_PYTHON), "-m", "tests.kernel_sweep", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=480, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def test_complaints_of_ptxas_are_found() -> None:
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    spilled = "8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    serialized = "warning : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert list(ptxas_complaints(f"{clean}\n{spilled}\n{serialized}\n")) == [spilled, serialized]


def test_kernel_that_a_cubin_lacks_is_a_problem() -> None:
    source = replace(PUBLISH, kernels=(KernelEntry("absent", ()),))
    assert compile_problems(source, source.samples, WARPGROUP_ARCH, in_registers=True) == [
        "publish.cu: sm_90a {}: no kernel absent"
    ]


def test_source_that_does_not_compile_is_a_problem() -> None:
    (problem,) = compile_problems(ROWS, [{"HIDDEN": 7, "ACTIVATION_LAYOUT": 0}], "sm_80", in_registers=True)
    assert problem.startswith("gpu/kernels/rows.cu: sm_80")
