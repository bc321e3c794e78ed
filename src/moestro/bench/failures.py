"""Calls that may fail without ending a run."""

from __future__ import annotations

import functools
import importlib.util
import subprocess

import torch


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """What a variant may raise where it cannot run; the row then says so and the run goes on.

    Among them are Triton's own errors, of kernels that do not compile or fit, where Triton is installed.
    """
    broken = (RuntimeError, LookupError, AssertionError, OSError, ArithmeticError, subprocess.SubprocessError)
    known = (*broken, ImportError, AttributeError, ValueError, TypeError)
    if importlib.util.find_spec("triton") is None:
        return known
    return (*known, importlib.import_module("triton.errors").TritonError)


class DeviceLostError(Exception):
    """The device computes nothing for this process any more, as after an access to memory that is not there.

    `variant` is what ran when that was noticed, or None where that is not known, and `reason` what it raised.
    """

    def __init__(self, variant: str | None, reason: str) -> None:
        super().__init__(reason)
        self.variant, self.reason = variant, reason


def check_device(device: torch.device, variant: str | None, reason: str) -> None:
    """After a variant failed: a `DeviceLostError` if the device did not survive it."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except failures() as error:
            raise DeviceLostError(variant, reason) from error


def sentence(error: Exception) -> str:
    """An error's text in one line, or its class where it says nothing."""
    return " ".join(str(error).split())[:300] or type(error).__name__
