"""Arguments of other kinds than an operation takes are refused in four parts, before anything looks at them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moestro
from moestro.errors import InvalidInputError
from moestro.ops.inputs import check_call, check_tensor

X = torch.randn(2, 8)
ROUTING = moestro.Routing(torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 2))
WEIGHTS = moestro.ExpertWeights.from_dense(torch.randn(2, 8, 8), torch.randn(2, 8, 4))


def test_what_fits_passes() -> None:
    check_call("expert_mlp", X, ROUTING, WEIGHTS)
    check_tensor("topk", "scores", torch.nn.Parameter(X))


@pytest.mark.parametrize(
    ("value", "got", "fix"),
    [
        (None, "got no value", "Pass a tensor"),
        (np.zeros((2, 8)), "numpy.ndarray", r"torch\.as_tensor"),
        ([[1.0]], "builtins.list", r"torch\.as_tensor"),
        (X.to_sparse(), "scores, a tensor of layout torch.sparse_coo", r"to_dense\(\)"),
        (X.to("meta"), "on the meta device", "real device"),
        (torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged), "that is nested", "to_padded_tensor"),
    ],
    ids=["None", "numpy", "list", "sparse", "meta", "nested"],
)
def test_no_tensor_to_read(value: object, got: str, fix: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^\[topk\] .*{got}.*; needs .*\. .*{fix}") as caught:
        check_tensor("topk", "scores", value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((np.zeros((2, 8)), ROUTING, WEIGHTS), "got a value of type numpy.ndarray; needs a torch.Tensor for x"),
        (
            (X, (ROUTING.expert_ids, ROUTING.routing_weights), WEIGHTS),
            "got a tuple as routing; needs a moestro.Routing",
        ),
        ((X, ROUTING, torch.randn(2, 8, 8)), "got a Tensor as weights; needs a moestro.ExpertWeights"),
        ((X, ROUTING.to("meta"), WEIGHTS), "got expert_ids, a tensor on the meta device"),
    ],
    ids=["numpy", "tuple", "tensor", "meta ids"],
)
def test_a_call_of_other_kinds(given: tuple[object, ...], says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_call("expert_mlp", *given)
    assert str(caught.value).startswith(f"[expert_mlp] {says}")
