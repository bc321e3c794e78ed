"""What Transformers calls: ids beyond the experts cost no launch of their own."""

from __future__ import annotations

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights
from moestro.hf import experts
from ops import problems
from tolerances import bit_equal

SIZES = problems.Sizes(3, 32, 16, 4, 2)
BEYOND = torch.tensor([[0, 4], [1 << 33, 3], [7, 4]])
INSIDE = torch.tensor([[0, -1], [-1, 3], [-1, -1]])


def case(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights]:
    weights = problems.weights(SIZES, Activation(), torch.float32)
    return torch.randn(3, 32).to(device), torch.rand(3, 2).to(device), weights


def apply(x: torch.Tensor, ids: torch.Tensor, by: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    with torch.no_grad():
        return experts.apply(x, ids.to(x.device), by, weights, "auto")


def test_kernels_take_ids_beyond_the_experts_for_empty_slots(triton_device):
    x, by, weights = case(torch.device("cpu"))
    expected = apply(x, INSIDE, by, weights)
    for _ in range(3):
        assert bit_equal(apply(x, BEYOND, by, weights), expected)


def test_so_does_plain_torch():
    x, by, weights = case(torch.device("cpu"))
    with moestro.use(implementation="torch"):
        assert bit_equal(apply(x, BEYOND, by, weights), apply(x, INSIDE, by, weights))


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_no_graph_looks_through_ids(name):
    pytest.importorskip("triton")
    x, by, weights = case(torch.device("cpu"))
    seen: list[str] = []

    class Layer(torch.nn.Module):
        def forward(self, x, ids, by):
            return experts.apply(x, ids, by, weights, "auto")

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    with moestro.use(implementation=name), torch.no_grad():
        compiled = torch.compile(Layer(), fullgraph=True, backend=keep)
        assert bit_equal(compiled(x, BEYOND, by), apply(x, INSIDE, by, weights))
    assert not any("masked_fill" in target for target in seen)
