"""What every test runs under: one thread, fixed seeds, NaN in memory that nobody has written, no network."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch starts its threads: workers of one machine that each take every core are slower than one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# No test is decided by what is timed; those about timing say so.
os.environ["MOESTRO_MEASURE"] = "0"
# What busy processes measure is not kept for the user of this machine.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "user")
# What each test compiles is small: headers compiled before it would take longer than they save.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import hypothesis
import numpy as np
import pytest
import torch
import typer.testing

import moestro
from moestro import machine

# Before anything imports triton: without a GPU its kernels run in Triton's interpreter, on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moestro.bench.peers import outside
from source import ROOT

outside.CHECKOUT = ROOT  # where the package under test is an installed one, too
if hasattr(typer.testing, "_get_command"):  # all commands are made anew at every call
    typer.testing._get_command = functools.cache(typer.testing._get_command)

hypothesis.settings.register_profile(
    "moestro",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("moestro")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that they start."""
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", machine.cores() + 1))


# Of kinds of devices that are not there torch.manual_seed notes a formatted stack at every call.
seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    seed_torch(0)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch.empty and its kin return NaN (integers: the largest value), so whoever reads unwritten memory is found.

    PyTorch fills only in its deterministic mode. A test that is about the bits of the default mode switches this off
    with ``@pytest.mark.unpoisoned``. Transformers' own models may hold parameters that nothing initialises, so tests
    under tests/hf and tests/cli run without.
    """
    if request.node.get_closest_marker("unpoisoned") or {"hf", "cli"} & set(request.path.parent.parts):
        yield
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # a page of the docs switches it off
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def forgotten_graphs() -> Iterator[None]:
    """A function, of Transformers for one, is compiled only so many times in a process, whichever tests share it."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Triton's interpreter without what it does for nothing."""
    if importlib.util.find_spec("triton") is not None:
        import interpreted

        interpreted.install()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """A collection looks at what tests of this file have made, not at ten thousand tests and all that is imported.

    It takes half a second with them, and tests, benchmarks and Python itself collect often.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def plain_torch() -> Iterator[None]:
    """Only the implementation in plain PyTorch runs, whatever else is installed."""
    with moestro.use(implementation="torch"):
        yield


@pytest.fixture
def triton_device() -> Iterator[torch.device]:
    """Where Triton's kernels run in this process, and they are forced: a GPU, or the CPU under the interpreter."""
    pytest.importorskip("triton")
    with moestro.use(implementation="triton"):
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
