"""What the opt-in rewrites of a routing cost in quality: bits per byte of the bundled model with each of them on.

    python examples/rewrites_quality.py            about two minutes on two CPU cores

The text is every fourth of the files that the model's training held out (`train_bundled.py`). A rewrite runs in every
layer, on the routing that the model's own router made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moestro
from moestro.routing import drop_over_capacity, expert_counts, keep_confident, most_used, prune_experts, rescale

sys.path.insert(0, str(Path(__file__).parent))
from train_bundled import bits_and_load, read_corpus

FOLDER = Path(moestro.__file__).parent / "bundled"
Rewrite = Callable[[moestro.Routing], moestro.Routing]


class Rewriter:
    """The experts of every layer, with one rewrite before them; counts the slots that stay."""

    def __init__(self) -> None:
        self.rewrite: Rewrite = lambda routing: routing
        self.kept = self.slots = 0

    def __call__(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        routing = self.rewrite(moestro.Routing(ids, weights.float()))
        self.kept += int((routing.expert_ids >= 0).sum())
        self.slots += ids.numel()
        experts = moestro.ExpertWeights.from_dense(module.gate_up_proj, module.down_proj)
        return moestro.expert_mlp(x, routing, experts)


def pruned(num_kept: int) -> Rewrite:
    """Keep the experts that the batch itself uses most, and give the others' weight to the slots that stay."""

    def rewrite(routing: moestro.Routing) -> moestro.Routing:
        keep = most_used(expert_counts(routing, 16), num_kept)
        return rescale(prune_experts(routing, keep))

    return rewrite


REWRITES: dict[str, Rewrite] = {
    "none": lambda routing: routing,
    "keep_confident(min_share=0.25), rescaled": lambda r: rescale(keep_confident(r, min_share=0.25)),
    "keep_confident(min_share=0.5), rescaled": lambda r: rescale(keep_confident(r, min_share=0.5)),
    "keep_confident(mass=0.8), rescaled": lambda r: rescale(keep_confident(r, mass=0.8)),
    "prune_experts, 14 of 16 kept": pruned(14),
    "prune_experts, 12 of 16 kept": pruned(12),
    "drop_over_capacity(1.25)": lambda r: drop_over_capacity(r, 16, 1.25)[0],
    "drop_over_capacity(1.0)": lambda r: drop_over_capacity(r, 16, 1.0)[0],
}


def main() -> None:
    rewriter = Rewriter()
    ALL_EXPERTS_FUNCTIONS.register("rewritten", rewriter.__call__)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, experts_implementation="rewritten"
    ).eval()
    texts = read_corpus()[1][::4]
    size = sum(len(text.encode()) for text in texts)
    documents = [np.array(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    print(f"{len(texts)} held-out files, {size} bytes\n\n| rewrite | slots kept | bits per byte |\n|---|---:|---:|")
    for name, rewrite in REWRITES.items():
        rewriter.rewrite, rewriter.kept, rewriter.slots = rewrite, 0, 0
        bits, _ = bits_and_load(model, documents)
        print(f"| {name} | {rewriter.kept / rewriter.slots:.1%} | {bits / size:.4f} |", flush=True)


if __name__ == "__main__":
    main()
