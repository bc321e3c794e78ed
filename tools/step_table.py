"""Which causal language models of Transformers share steps and reuse prompts, measured: ``python tools/step_table.py``.

For every architecture of `zoo.architectures` a tiny float32 model with random weights takes in one step a token of two
requests and a part of a third's prompt. The distance is that of its logits from those of each request alone, over their
largest value.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
import transformers

import zoo
from moestro.errors import UnsupportedError
from moestro.serve import batch
from moestro.serve.step_model import StepModel

PROMPTS = (tuple(range(4, 24)), (30, 31, 32, 33, 34, 35, 36, 37), (40, 41))
NEXT = ((50,), (51, 54, 55, 56, 57, 58, 59, 60, 61), (52,))


@torch.no_grad()
def row(architecture: str) -> tuple[str, str]:
    """What an architecture can, and what was found."""
    model = zoo.build(architecture).model
    name = type(model).__name__
    if not name.endswith("ForCausalLM"):
        return "no causal language model", name
    try:
        alone = StepModel(model)
    except UnsupportedError as error:
        return "refused", str(error)
    if alone.why_not_reused is not None:
        return "one by one, nothing reused", f"needs {alone.why_not_reused}"
    try:
        stepped = StepModel(model, several=True)
    except UnsupportedError as error:
        return "one by one, prompts reused", str(error)
    caches = [stepped.new_cache(len(prompt) + 9) for prompt in PROMPTS]
    for prompt, cache in zip(PROMPTS, caches, strict=True):
        stepped.read(prompt, cache)
    found = stepped.step(NEXT, caches)
    whole = [(*prompt, *tokens) for prompt, tokens in zip(PROMPTS, NEXT, strict=True)]
    expected = torch.cat([alone.read(ids, alone.new_cache(len(ids))) for ids in whole])
    distance = float((found - expected).abs().max() / expected.abs().max())
    way = "keys apart" if stepped.gather is batch.APART else "keys joined"
    return "shares steps", f"{way}, {distance:.1e} from alone"


def main() -> None:
    """Print a line for each architecture, and how many there are of each kind."""
    transformers.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    for architecture in sys.argv[1:] or zoo.architectures():
        kind, said = row(architecture)
        counts[kind] += 1
        print(f"{architecture:24} {kind}: {said}", flush=True)
    print(f"Transformers {transformers.__version__}: {dict(counts)}")


if __name__ == "__main__":
    main()
