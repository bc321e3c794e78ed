"""What a call costs the host, up to where Triton's launcher begins: functions of Python called, and microseconds.

    TRITON_INTERPRET=0 python -m ops.host_calls [float32 mxfp4 ...] [time]

Without a GPU a recorder stands in for the launcher, and tensors lie on the CPU; with one, launches are real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro import ExpertWeights, Routing
from moestro.ops import expert_mlp, topk
from moestro.ops.expert_mlp import library
from moestro.ops.topk import plain
from moestro.routing import route
from moestro.routing import triton as routing_triton

from .compiled import launching, taken_for_a_gpu
from .stored import apart, moved

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from host_calls import microseconds

T, H, I, E, K = 1, 256, 128, 64, 8  # noqa: E741
REPEATS = 300


def calls(form: str, num_tokens: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """What is measured as a user calls it, by name; each computes the same at every call."""
    dense = ExpertWeights.from_dense(torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16())
    weights = moved(dense.quantize(form.removesuffix("+apart")), device)
    if form.endswith("+apart"):
        weights = apart(weights)
    x = torch.randn(num_tokens, H, device=device).bfloat16()
    ids = torch.rand(num_tokens, E, device=device).argsort(1)[:, :K].contiguous()
    routing = Routing(ids, torch.rand(num_tokens, K, device=device))
    logits = torch.randn(num_tokens, E, device=device)
    layout = f"{library.write_layout(weights.gate_up)}|{library.write_layout(weights.down)}"
    stored = list(weights.gate_up.tensors), list(weights.down.tensors), None, None
    node = (x, ids, routing.routing_weights, *stored, "output", weights.activation.code, layout, "auto")
    return {
        f"expert_mlp {form} T={num_tokens}": lambda: expert_mlp.run(x, routing, weights),
        f"node {form} T={num_tokens}": lambda: torch.ops.moestro.expert_mlp_on_device(*node),
        f"route T={num_tokens}": lambda: route(logits, K),
        f"topk T={num_tokens}": lambda: topk.run(logits, K),
    }


def functions(call: Callable[[], Any]) -> int:
    """Functions of Python that a call enters, itself not counted."""
    entered = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        entered[0] += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[0] - 1


@contextmanager
def device() -> Iterator[torch.device]:
    """A GPU, or what is taken for one."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            yield torch.device("cuda")
            return
        # What only tensors of the CPU are looked at for.
        patch.setattr(plain, "refuse_nan", lambda scores: None)
        patch.setattr(routing_triton, "_good", lambda *given: True)
        with launching("sm_90"), taken_for_a_gpu():
            yield torch.device("cpu")


def main(arguments: list[str]) -> None:
    """Print a line for each call."""
    timed = "time" in arguments
    with device() as where, torch.no_grad():
        for form in [a for a in arguments if a != "time"] or ["bfloat16", "mxfp4"]:
            for num_tokens in (1, 64):
                for name, call in calls(form, num_tokens, where).items():
                    call()
                    call()
                    spent = f"  {microseconds(call, REPEATS):.1f} us" if timed else ""
                    print(f"{name}: {functions(call)} functions{spent}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
