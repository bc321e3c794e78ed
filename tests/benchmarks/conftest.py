"""Small layers, a roof that is not measured, and benchmarks/run.py."""

import importlib.util
import sys
from types import ModuleType

import pytest

from source import ROOT
from tiny_layers import known_roof, tiny_fixture

__all__ = ["known_roof", "tiny_fixture"]


@pytest.fixture(scope="session")
def command() -> ModuleType:
    """The module of benchmarks/run.py."""
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_run", folder / "run.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
