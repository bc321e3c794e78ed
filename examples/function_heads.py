"""Whether a small language model of Python completes the heads of functions into Python.

    python examples/function_heads.py src/moestro/bundled

Each of the 50 heads in `function_heads.txt` is continued by 64 tokens, sampled as the model's own generation
configuration says, from a seed of its own; six times, from other seeds. Counted are texts that parse when cut behind
their last whole line, and texts in which one line stands three times or more.
"""

from __future__ import annotations

import argparse
import ast
import collections
import warnings
from pathlib import Path

import torch
import transformers

HEADS = Path(__file__).with_suffix(".txt").read_text().splitlines()
NEW_TOKENS, DRAWS, SEEDS_APART = 64, 6, 1000


def parses(text: str) -> bool:
    """Whether the whole lines of a text are Python; a method's head is taken without its class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text[: text.rfind("\n") + 1])
        except (SyntaxError, ValueError):
            return False
    return "\n" in text


def most_repeated_line(text: str) -> int:
    """How often the most frequent line stands in a text; empty ones do not count."""
    lines = (line.strip() for line in text.splitlines())
    return max(collections.Counter(line for line in lines if line).values())


def complete(folder: Path, heads: list[str], first_seed: int = 0, **sampling: float) -> list[str]:
    """Each head and what the model says after it; `sampling` takes the place of its own configuration."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for seed, head in enumerate(heads, first_seed):
        torch.manual_seed(seed)
        ids = tokenizer(head, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **sampling)
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return texts


def measure(folder: Path, **sampling: float) -> dict[str, list[int] | int]:
    """Of each draw: how many texts parse, and how many say a line three times."""
    draws = [complete(folder, HEADS, SEEDS_APART * draw, **sampling) for draw in range(DRAWS)]
    return {
        "heads": len(HEADS),
        "parse": [sum(map(parses, texts)) for texts in draws],
        "a_line_three_times": [sum(most_repeated_line(text) >= 3 for text in texts) for texts in draws],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete 50 heads of functions and count what parses.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--temperature", type=float, help="in place of the model's own")
    parser.add_argument("--top-p", type=float, help="in place of the model's own")
    parser.add_argument("--repetition-penalty", type=float, help="in place of the model's own")
    parser.add_argument("--no-repeat-ngram-size", type=int, help="in place of the model's own")
    parser.add_argument("--show", action="store_true", help="print the texts too")
    options = parser.parse_args()
    names = ("temperature", "top_p", "repetition_penalty", "no_repeat_ngram_size")
    sampling = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.show:
        for text in complete(options.folder, HEADS, **sampling):
            print(
                text, f"# parses: {parses(text)}, most frequent line: {most_repeated_line(text)}", sep="\n", end="\n\n"
            )
    print(measure(options.folder, **sampling))


if __name__ == "__main__":
    main()
