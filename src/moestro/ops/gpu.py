"""What Triton's kernels need of a machine and of a tensor, or the sentence why it is not there."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from moestro import settings
from moestro.ops import native

NAME = "triton"
"""What the implementations that launch Triton's kernels are called."""


@functools.cache
def missing() -> str | None:
    """Why there are no kernels at all; None if Triton is installed. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install moestro[gpu]"
    return None


@functools.cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU and slowly: TRITON_INTERPRET=1 when Triton was imported."""
    if missing() is not None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def unreadable(tensor: Tensor) -> str | None:
    """Why kernels cannot read one tensor of numbers where it lies; None if they can.

    A tensor on the CPU is read by the interpreter alone, and only where "triton" is forced by name.
    """
    if missing() is not None:
        return missing()
    if not tensor.is_cuda:
        reason = _not_interpreted(tensor)
        if reason is not None:
            return reason
    if torch.compiler.is_compiling():
        return "a graph that is traced is to see every operation"
    if not native.is_ordinary(tensor):
        return "it reads memory as it is, and its argument is of a subclass or stands for its negative"
    if native.is_watched():
        return "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
    return None


def _not_interpreted(tensor: Tensor) -> str | None:
    if not tensor.is_cpu:
        return f"it computes on a CUDA device, and its argument is on {tensor.device.type}"
    if settings.current().implementation != NAME:
        return "it computes on a CUDA device, and its argument is on cpu"
    if not interpreted():
        return "its argument is on cpu, where kernels run only in Triton's interpreter: set TRITON_INTERPRET=1"
    return None
