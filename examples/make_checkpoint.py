"""Write a checkpoint with random weights in the exact layout of a published one.

    python examples/make_checkpoint.py build/gpt-oss-20b --like gpt-oss-20b
    python examples/make_checkpoint.py build/cut --like deepseek-v3 --layers 5
    python examples/make_checkpoint.py build/small --like mixtral-8x7b --tiny --fused
    python examples/make_checkpoint.py build/qwen3-mxfp4 --like qwen3-30b-a3b --format mxfp4
    python examples/make_checkpoint.py build/steady --like gpt-oss-20b --branches 0.05 --routers 4

Configuration, tensor names, shapes, dtypes and the names of the files are the published ones; the numbers are random,
of sizes that keep what passes through the layers finite and spread the routing. The tokenizer is a stand-in (real ones
cannot be shipped): each byte is a token, other ids show as their number. Memory holds no more than one expert's
numbers, so every model can be written at full size: gpt-oss-20b takes 13.8 GB of disk, DeepSeek-V3 689 GB.

With random numbers of full size a rounding grows from layer to layer: it turns choices of experts, and two correct
programs end with other logits. With --branches 0.05 a layer adds little to what passes through, and with --routers 4
the last of the chosen experts has little weight, so that a turned choice changes little: then they agree. That is so of
routers by softmax; by sigmoid (DeepSeek-V3, GLM-4.5, Llama 4) the chosen experts weigh about the same at any size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestro.checkpoint import TensorSpec, plan_shards, write_file, write_index
from moestro.checkpoint.scheme import MARK, Scheme
from moestro.errors import InvalidInputError, invalid_input
from moestro.formats import find_format
from published import PUBLISHED, Published
from published.configs import TINY_IDS
from published.family import Experts
from published.fill import Filler
from published.tensors import InFormat, Item, fused
from published.tokenizer import special_tokens, write_tokenizer

SHARD_BYTES = 5_000_000_000
BESIDE_BYTES = 50_000_000
"""What headers, the index and the tokenizer take at most."""
_LAST = re.compile(r"\b(o_proj|out_proj|down_proj\w*|w2)\b")
"""In names of tensors: what attention and experts end with."""
_ROUTER = re.compile(r"\b(router|gate)(\.layer)?\.weight$")
"""In names of tensors: what logits of experts are computed with."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Request:
    """What to write.

    Attributes:
        like: a key of `PUBLISHED`.
        layers: the first so many layers only; without the multi-token prediction layer, where there is one.
        tiny: shrink every size; names and dtypes stay.
        fused: experts stacked in one tensor a projection, where the published ones are unstacked.
        format: a format of moestro, to store the experts as moestro's own checkpoints do.
        branches: what attention and experts add to what passes through a layer is so many times its usual size.
        routers: the logits of experts are so many times their usual size.
    """

    like: str
    layers: int | None = None
    tiny: bool = False
    fused: bool = False
    format: str | None = None
    branches: float = 1.0
    routers: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A checkpoint before it is written.

    Attributes:
        published: the model it is like.
        config, generation: config.json and generation_config.json, the latter where the published one has it.
        items: every tensor, in no particular order.
        whole: whether it has all layers at full size.
    """

    published: Published
    config: dict[str, Any]
    generation: dict[str, Any] | None
    items: tuple[Item, ...]
    whole: bool

    @property
    def nbytes(self) -> int:
        return sum(item.spec.nbytes for item in self.items)

    def files(self, shard_bytes: int | None = None) -> dict[str, list[TensorSpec]]:
        """By file name, the tensors of each file of at most `shard_bytes`; None: in as many files as published."""
        specs = [item.spec for item in self.items]
        count = self.published.shards
        if shard_bytes is None and self.whole and count is not None:
            shard_bytes = -(-self.nbytes // count)
            while len(shards := plan_shards(specs, shard_bytes)) > count:
                shard_bytes += shard_bytes // 200
        else:
            shards = plan_shards(specs, shard_bytes or SHARD_BYTES)
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        first = self.published.first_file
        last = first + len(shards) - 1
        return {self.published.file_name.format(n, last): shard for n, shard in enumerate(shards, first)}


def plan(request: Request) -> Plan:
    """What a request comes to: a pure function, at no cost whatever the size.

    Raises:
        InvalidInputError: no such model, no experts in so few layers, or a layout or format that does not suit it.
    """
    if request.like not in PUBLISHED:
        _refuse(f"--like {request.like}", f"one of {', '.join(PUBLISHED)}", "Pick one.")
    published = PUBLISHED[request.like]
    _check_layers(request, published)
    experts, config = _experts(request, published, published.configure(request.tiny, request.layers))
    generation = published.generation
    if generation is not None and request.tiny:
        generation = {key: TINY_IDS.get(key, value) for key, value in generation.items()}
    whole = not request.tiny and request.layers is None
    items = _resized(list(published.layout(config, experts)), request)
    return Plan(published, config, generation, items, whole)


def _resized(items: list[Item], request: Request) -> tuple[Item, ...]:
    """The items, with the routers and the last matrix of each attention and expert of the size asked for."""
    if not 0 < request.branches <= 1:
        _refuse(f"--branches {request.branches:g}", "a number above 0, and 1 at most", "Leave it out, or take 0.05.")
    if not 1 <= request.routers <= 16:
        _refuse(f"--routers {request.routers:g}", "a number from 1 to 16", "Leave it out, or take 4.")
    names = {item.name for item in items}

    def size(item: Item) -> float:
        if _ROUTER.search(item.name):
            return request.routers
        again = item.name.replace("_scales", "_global_scales")
        scaled_again = again != item.name and again in names
        return request.branches if _LAST.search(item.name) and not scaled_again else 1.0

    return tuple(replace(item, fill=replace(item.fill, size=item.fill.size * size(item))) for item in items)


def _check_layers(request: Request, published: Published) -> None:
    kept = published.text_config(published.configure(request.tiny, None))
    least = kept.get("first_k_dense_replace", 0) + 1
    most = published.text_config(published.config)[published.layers]
    if request.layers is not None and not least <= request.layers <= most:
        needs = f"{least} to {most} layers" + (f", of which the first {least - 1} have no experts" if least > 1 else "")
        _refuse(f"--layers {request.layers} for {request.like}", needs, "Leave it out for all of them.")


def _experts(request: Request, published: Published, config: dict[str, Any]) -> tuple[Experts, dict[str, Any]]:
    """How to store the experts, and what config.json says of it."""
    if request.fused and request.format:
        _refuse("--fused with --format", "one of them", "A format stores experts stacked already.")
    if request.fused:
        if not published.fusable:
            _refuse(f"--fused for {request.like}", "bfloat16 unstacked experts", "Leave --fused out.")
        return fused, config
    if request.format is None:
        return published.experts, config
    form = find_format(request.format)
    if form.is_dense:
        _refuse(
            f"--format {form.name}", "a format with scales", "Leave it out for the published layout, or use --fused."
        )
    if not published.own_formats:
        needs = "a model that has everything but its experts in bfloat16"
        _refuse(f"--format for {request.like}", needs, "Take qwen3-30b-a3b, or quantise the written checkpoint.")
    return InFormat(form), config | MARK | {"quantization_config": Scheme(form.name).as_config()}


def write(
    plan: Plan,
    folder: Path,
    seed: int = 0,
    shard_bytes: int | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a planned checkpoint into a folder; config.json, which makes it a checkpoint, last.

    Raises:
        InvalidInputError: the folder holds something or cannot be made, or the disk holds too little.
    """
    if folder.is_dir() and any(folder.iterdir()):
        _refuse(f"{folder}, which is not empty", "a folder that is empty or does not exist", "Name another one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(f"{folder} ({error.strerror})", "a folder that is empty or can be made", "Name another one.")
    free, needed = shutil.disk_usage(folder).free, plan.nbytes + BESIDE_BYTES
    if free < needed:
        needs = f"{needed / 1e9:.1f} GB, the size of {plan.published.repository} as asked for"
        _refuse(f"{free / 1e9:.1f} GB of free space at {folder}", needs, "Make room, or cut it with --layers.")
    files = plan.files(shard_bytes)
    filler = Filler({item.name: item.fill for item in plan.items}, seed, on_bytes)
    for name, specs in files.items():
        pieces = ((spec.name, piece) for spec in specs for piece in filler(spec))
        write_file(folder / name, specs, pieces, {"format": "pt"})
    if len(files) > 1:
        write_index(folder, files)
    text = plan.published.text_config(plan.config)
    write_tokenizer(folder, text["vocab_size"], special_tokens(plan.generation or {}, text))
    if plan.generation is not None:
        _write_json(folder / "generation_config.json", plan.generation)
    _write_json(folder / "config.json", plan.config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _refuse(got: str, needs: str, fix: str) -> None:
    raise invalid_input("make_checkpoint", got=got, needs=needs, fix=fix)


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB or 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.strip(), re.IGNORECASE)
    unit = found[2].upper() if found else "?"
    unit += "B" if unit in ("K", "M", "G", "T") else ""
    if found is None or unit.removesuffix("B") + "B" not in {*UNITS, "B"} or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB or 500MB")
    return int(float(found[1]) * UNITS.get(unit, 1))


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DST", help="a folder that is empty or does not exist")
    parser.add_argument("--like", required=True, choices=PUBLISHED, metavar="MODEL", help=", ".join(PUBLISHED))
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--tiny", action="store_true", help="every size small; names and dtypes stay")
    parser.add_argument("--fused", action="store_true", help="experts stacked, where Transformers reads that too")
    parser.add_argument("--format", help="experts in one of moestro's formats, as moestro's own checkpoints have them")
    parser.add_argument("--branches", type=float, default=1.0, help="size of what each layer adds; usually 1")
    parser.add_argument("--routers", type=float, default=1.0, help="size of the logits of experts; usually 1")
    sharding = parser.add_mutually_exclusive_group()
    sharding.add_argument("--shard-size", type=parse_size, help="such as 5GB, the default of cut and tiny models")
    sharding.add_argument("--single-file", action="store_true", help="one file, whatever its size")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 1 if it was refused."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    args = _arguments(arguments)
    try:
        planned = plan(Request(args.like, args.layers, args.tiny, args.fused, args.format, args.branches, args.routers))
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task(args.like, total=planned.nbytes)
            shard_bytes = planned.nbytes if args.single_file else args.shard_size
            write(planned, args.folder, args.seed, shard_bytes, lambda count: progress.advance(task, count))
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.folder}: {planned.nbytes:,} bytes in {len(planned.items):,} tensors like {args.like}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
