"""Calls that may fail without ending a run."""

from __future__ import annotations

import functools
import importlib
import subprocess
from collections.abc import Callable
from typing import Any

from moestro.bench.peers.variant import Call
from moestro.bench.timing import OwnClock
from moestro.errors import UnsupportedError


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """What a variant may raise where it cannot run; the row then says so and the run goes on.

    Among them are Triton's own errors, of kernels that do not compile or fit, where Triton is installed.
    """
    broken = (RuntimeError, LookupError, AssertionError, OSError, ArithmeticError, subprocess.SubprocessError)
    known = (*broken, ImportError, AttributeError, ValueError, TypeError, UnsupportedError)
    try:
        errors: Any = importlib.import_module("triton.errors")
    except ImportError:
        return known
    return (*known, errors.TritonError)


class _Guarded:
    """A call, noting in `failed` under `name` what it raised: its times are then worth nothing."""

    def __init__(self, call: Call, name: str, failed: dict[str, str]) -> None:
        self.call, self.name, self.failed = call, name, failed

    def __call__(self) -> None:
        self._noting(self.call)

    def _noting(self, do: Callable[[], object]) -> object:
        try:
            return do()
        except failures() as error:
            self.failed[self.name] = sentence(error)
            return 0.0


class _GuardedClock(_Guarded):
    """The same of a call that has a clock of its own."""

    def seconds(self) -> float:
        """Those of the call, 0 where it raised."""
        assert isinstance(self.call, OwnClock)
        found: Any = self._noting(self.call.seconds)
        return float(found)


def guarded(call: Call, name: str, failed: dict[str, str]) -> _Guarded:
    """The call, with its own clock where it has one, which notes in `failed` under `name` what it raised."""
    return (_GuardedClock if isinstance(call, OwnClock) else _Guarded)(call, name, failed)


def sentence(error: Exception) -> str:
    """An error's text in one line, or its class where it says nothing."""
    return " ".join(str(error).split())[:300] or type(error).__name__
