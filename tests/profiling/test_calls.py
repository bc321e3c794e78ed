"""Calls of modules are told of while somebody looks, and a module is as it was afterwards."""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from moestro.profiling.calls import observed_calls

X = torch.ones(2, 3)


class Linear(nn.Linear):
    """One that fails when it is asked to."""

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise KeyboardInterrupt
        return super().forward(x)


def observed(stack: ExitStack, module: nn.Module, told: list[str], name: str = "") -> None:
    block = observed_calls(module, lambda *_: told.append(f"{name}("), lambda result: told.append(f"){name}"))
    stack.enter_context(block)


def test_beginnings_and_ends() -> None:
    module, told = Linear(3, 3), list[str]()
    expected = module(X)
    with ExitStack() as stack:
        observed(stack, module, told, "a")
        observed(stack, module, told, "b")
        assert torch.equal(module(X), expected)
        assert told == ["b(", "a(", ")a", ")b"]
        told.clear()
        with pytest.raises(KeyboardInterrupt):
            module(X, fail=True)
        assert told == ["b(", "a(", ")a", ")b"]
        assert isinstance(module, Linear)
    told.clear()
    module(X)
    assert told == []
    assert type(module) is Linear


def test_blocks_may_overlap() -> None:
    module, told = Linear(3, 3), list[str]()
    first, second = ExitStack(), ExitStack()
    observed(first, module, told, "a")
    observed(second, module, told, "b")
    first.close()
    module(X)
    assert told == ["b(", ")b"]
    second.close()
    assert type(module) is Linear


def test_copies_are_not_observed() -> None:
    module, told = Linear(3, 3), list[str]()
    with ExitStack() as stack:
        observed(stack, module, told)
        copies = copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))
        for each in copies:
            assert type(each) is Linear
            each.weight = nn.Parameter(torch.zeros(3, 3))
            assert torch.equal(each(X), each.bias.expand(2, 3))
    assert told == []


def test_graphs_that_are_made_meanwhile_have_nothing_of_it() -> None:
    module, told = nn.Sequential(Linear(3, 3)), list[str]()
    expected = module(X)
    with ExitStack() as stack:
        observed(stack, module[0], told)
        graph = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(graph(X), expected)
    assert torch.equal(graph(X), expected)
    assert told == []
