"""What launches of prepared calls hand the driver: the same at every call, other addresses for other tensors.

    TRITON_INTERPRET=0 python -m ops.relaunched [bfloat16 int8/int8 mxfp4+apart ...]

A driver that writes down what it is handed stands in for the one that is missing; see `compiled`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import moestro
from moestro import ExpertWeights, Routing
from moestro.formats import PackedTensor, SplitTensor, StoredExperts
from moestro.ops import dispatch, expert_mlp
from moestro.ops.expert_mlp import EXPERT_MLP

from .compiled import launching, taken_for_a_gpu
from .stored import apart

H, I, E, K = 64, 32, 3, 2  # noqa: E741


@dataclass
class Call:
    """The arguments of a call on experts of a form; a change puts other tensors in their places."""

    form: str
    x: torch.Tensor
    routing: Routing
    weights: ExpertWeights

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.x, self.routing, self.weights, "auto"

    def owned(self) -> set[int]:
        """The addresses that launches are to be handed."""
        experts = [*first_of(self.weights.gate_up).tensors, *first_of(self.weights.down).tensors]
        return {t.data_ptr() for t in (self.x, self.routing.expert_ids, self.routing.routing_weights, *experts)}

    def storages(self) -> list[torch.Tensor]:
        """What keeps all memory of the call from being given to others."""
        own = self.x, self.routing.expert_ids, self.routing.routing_weights, *self.weights.tensors
        return [t.data for t in own]


def case(form: str, num_tokens: int) -> Call:
    stored, _, rows = form.removesuffix("+apart").partition("/")
    dense = ExpertWeights.from_dense(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I))
    weights = dense.quantize(stored, input_format=rows or "float")  # type: ignore[arg-type]
    x = torch.zeros(num_tokens, H).bfloat16()
    routing = Routing(torch.zeros(num_tokens, K, dtype=torch.long), torch.zeros(num_tokens, K))
    return Call(form, x, routing, apart(weights) if form.endswith("+apart") else weights)


def first_of(stored: StoredExperts) -> PackedTensor:
    """The stack, or of unstacked experts the matrix from which the table counts."""
    return stored.matrices[0][0] if isinstance(stored, SplitTensor) else stored


def pointers(arguments: Any) -> Iterator[int]:
    """Addresses among arguments, those of tensors included: a number that no size here reaches is one."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument.data_ptr()
        elif isinstance(argument, int) and argument > 1 << 32:
            yield argument
        elif isinstance(argument, tuple | list):
            yield from pointers(argument)
        elif hasattr(argument, "base"):
            yield argument.base.data_ptr()


def alike(first: Any, later: Any, same: set[int]) -> int:
    """Fail unless arguments are the first ones, addresses of tensors in their place; of those in `same`, their own.

    Returns:
        How many addresses were compared.
    """
    if isinstance(first, tuple | list):
        assert len(first) == len(later), (first, later)
        return sum(alike(u, v, same) for u, v in zip(first, later, strict=True))
    if isinstance(first, torch.Tensor) or (isinstance(first, int) and first > 1 << 32):
        (before,), (after,) = pointers([first]), pointers([later])
        assert after % 16 == before % 16, (first, later)
        assert after == before or before not in same, (first, later)
        return 1
    if not hasattr(first, "base") and type(first).__name__ not in ("LazyDict", "HookChain"):
        assert getattr(first, "value", first) == getattr(later, "value", later), (first, later)
    return 0


def handed_by(call: Call, handed: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What the driver is handed by a call."""
    handed.clear()
    expert_mlp.run(*call.arguments)
    return list(handed)


def is_kept(call: Call) -> bool:
    """Whether a prepared call that is kept will compute this one."""
    before = [kept.prepared for kept in dispatch._KEPT.values()]
    return any(dispatch.prepare(EXPERT_MLP, *call.arguments) is prepared for prepared in before)


def again(form: str, num_tokens: int) -> None:
    """Fail unless later calls launch what the first did, by address, and those of another layer its own tensors."""
    with launching("sm_90") as handed, taken_for_a_gpu(), torch.no_grad():
        call, other = case(form, num_tokens), case(form, num_tokens)
        other = replace(other, x=call.x, routing=call.routing)
        calls = [handed_by(c, handed) for c in (call, call, other, other)]
        assert is_kept(call)
        assert is_kept(other)
    assert len(calls[0]) >= 3
    for owner, launches in zip((call, call, other, other), calls, strict=True):
        missing = owner.owned() - set(pointers(launches))
        assert not missing, missing
    for i, launches in enumerate(calls):
        same = call.owned() if i < 2 else call.owned() & other.owned()
        for first, launch in zip(calls[0], launches, strict=True):
            assert alike(first, launch, same) >= (2 if launch[0] == "arrange_rows_kernel" else 3)
            print("relaunched", form, launch[0], len(launch))
    by_address = [a for launch in calls[1] for a in launch if isinstance(a, torch.Tensor)]
    assert not by_address, "a call like one before launches by address"


def _moved(call: Call) -> None:
    for t in call.weights.tensors:
        t.data = t.data.clone()


def _moved_last(call: Call) -> None:
    t = call.weights.down.tensors[-1]
    t.data = t.data.clone()


def _restrided(call: Call) -> None:
    t = first_of(call.weights.gate_up).data
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    for stored in (m for parts in _matrices(call.weights.gate_up) for m in parts):
        stored.data.data = wide.clone()[..., : t.shape[-1]]


def _matrices(stored: StoredExperts) -> tuple[tuple[PackedTensor, ...], ...]:
    return stored.matrices if isinstance(stored, SplitTensor) else ((stored,),)


def _freed(call: Call) -> None:
    """Another layer of other tensors in the very memory of the first, which is gone."""
    memory = [t.data for t in call.weights.tensors]
    made = case(call.form, len(call.x)).weights
    for t, where in zip(made.tensors, memory, strict=True):
        t.data = where
    call.weights = made
    gc.collect()


def _unaligned(call: Call) -> None:
    call.x = torch.zeros(call.x.numel() + 1).bfloat16()[1:].view(call.x.shape)


def _unaligned_weights(call: Call) -> None:
    t = call.weights.down.tensors[0]
    t.data = torch.zeros(t.numel() + 8, dtype=t.dtype)[8 // t.element_size() :][: t.numel()].view(t.shape)


CHANGES: dict[str, Callable[[Call], None]] = {
    "weights moved": _moved,
    "one tensor moved": _moved_last,
    "weights with other strides": _restrided,
    "weights of a layer that is gone": _freed,
    "weights off 16 bytes": _unaligned_weights,
    "x off 16 bytes": _unaligned,
    "x of another dtype": lambda call: setattr(call, "x", call.x.half()),
    "x with other strides": lambda call: setattr(call, "x", torch.zeros(len(call.x), 2 * H).bfloat16()[:, :H]),
    "other tokens": lambda call: _resize(call, len(call.x) + 1),
    "ids of another dtype": lambda call: setattr(
        call, "routing", replace(call.routing, expert_ids=call.routing.expert_ids.int())
    ),
    "weights on the input": lambda call: setattr(call, "routing", replace(call.routing, weight_on="input")),
}


def _resize(call: Call, num_tokens: int) -> None:
    made = case(call.form, num_tokens)
    call.x, call.routing = made.x, made.routing


def anew(form: str, num_tokens: int) -> None:
    """Fail unless a call is prepared anew after each change, and launches over what the change has left."""
    for name, change in CHANGES.items():
        with launching("sm_90") as handed, taken_for_a_gpu(), torch.no_grad():
            call = case(form, num_tokens)
            handed_by(call, handed)
            assert is_kept(call), name
            before, held = call.owned(), call.storages()
            handed.clear()  # which holds tensors
            change(call)
            assert not is_kept(call), name
            for _ in range(2):
                found = set(pointers(handed_by(call, handed)))
                assert call.owned() <= found, name
                assert not (before - call.owned()) & found, name
            assert is_kept(call), name
            held.clear()
        print("anew", form, name, flush=True)
    modes(form, num_tokens)


def modes(form: str, num_tokens: int) -> None:
    """Fail unless settings and the deterministic mode tell calls apart."""
    with launching("sm_90") as handed, taken_for_a_gpu(), torch.no_grad():
        call = case(form, num_tokens)
        handed_by(call, handed)
        torch.use_deterministic_algorithms(True)
        assert not is_kept(call)
        torch.use_deterministic_algorithms(False)
        with moestro.use(strategy="grouped"):
            assert not is_kept(call)
        assert is_kept(call)
    print("anew", form, "modes", flush=True)


def main(forms: list[str]) -> None:
    """Print a line for each launch and each change that was compared."""
    for form in forms or ["bfloat16", "int8/int8", "mxfp4+apart"]:
        for num_tokens in (1, 100):
            again(form, num_tokens)
        anew(form, 1 if "+apart" in form else 100)


if __name__ == "__main__":
    main(sys.argv[1:])
