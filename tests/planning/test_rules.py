"""The rules of AWS Neuron's guide give the guide's own figures, on its machine as a described one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.planning import read_machine, rules

SIZES = st.integers(1, 512)


def test_the_example_of_blocks():
    """2,000 tokens, 8 experts, blocks of 256: 15 blocks, of which 8 are needed when loads are even."""
    assert rules.num_blocks(2000, 1, 8, 256) == 15
    assert 15 * 256 == 3840
    assert (3840 - 2048) / 2048 == 0.875


def test_the_intensity_that_trainium2_needs():
    """400 to 500 FLOP per byte; of FP8 products, by the chip's published rates."""
    assert 400 <= read_machine("trn2").balance("fp8-e4m3-b128") <= 500


@pytest.mark.parametrize(
    ("num_experts", "top_k", "batch", "unique"), [(256, 8, 16, 128), (128, 8, 8, 64), (16, 1, 8, 8)]
)
def test_the_examples_of_selective_loading(num_experts, top_k, batch, unique):
    """DeepSeek, GPT-OSS and Llama 4, with the batch up to which half of the experts at most are loaded."""
    assert batch * top_k == unique == num_experts // 2
    assert rules.strategy(batch, top_k, num_experts) == "selective"


def test_the_example_of_all_experts():
    assert rules.strategy(32, 8, 256) == "all_experts"
    assert rules.strategy(32, 8, 256, alpha=1.0) == "all_experts"


def test_the_examples_of_degrees():
    """At most 32 experts: slices of each, if 128 columns are left; from 64 on whole ones."""
    assert rules.prefers(8, 14336, 8) == "tp"
    assert rules.prefers(256, 2048, 16) == "ep"
    assert rules.prefers(128, 768, 16) == "ep"
    assert rules.prefers(32, 1024, 16) == "both"
    assert rules.prefers(48, 2048, 8) == "tp"
    assert rules.prefers(48, 512, 8) == "ep"


@given(st.integers(1, 8192), SIZES, SIZES, st.floats(1, 2000))
def test_the_block_is_the_smallest_that_suffices(num_tokens, top_k, num_experts, balance):
    found = rules.block_size(num_tokens, top_k, num_experts, balance)
    enough = [s for s in rules.BLOCK_SIZES if rules.intensity(num_tokens, top_k, num_experts, s) >= balance]
    assert found == (min(enough) if enough else max(rules.BLOCK_SIZES))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from(rules.BLOCK_SIZES))
def test_no_routing_needs_more_blocks(loads, block):
    needed = sum(math.ceil(load / block) for load in loads)
    assert needed <= rules.num_blocks(sum(loads), 1, len(loads), block)
