"""Microseconds of each kernel of a layer on the GPU at hand, by its plan and by plans with other tiles.

    PYTHONPATH=src python benchmarks/gpu/kernel_times.py --layers olmoe --formats mxfp4 --tokens 1,16 \\
        --plans "columns=64 stages=4" "swap=0 columns=64" "rows=128 tails=2" --json found.json

A plan is the one that calls get with some of its fields changed: those of a tile in both products, so that one run says
of each product which tile it likes; and rows (of a block, too), tails and splits. PyTorch's profiler times the kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # as a file in this folder, whose names are those of a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.profiler import ProfilerActivity, profile

from gpu import first_checks, first_points, goals, tune
from gpu.first_points import Device
from gpu.items import REFUSED, Row
from moestro.bench.failures import failures, sentence
from moestro.bench.layers import Layer, active_experts, flops, inputs, named
from moestro.errors import MoestroError, invalid_input
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton, triton_maps
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile

CALLS = 6
COLD_BYTES = 200 << 20
"""Written before each call: more than the last cache of any part holds."""
_OF_PLANS = ("rows", "tails", "splits")
_OF_TILES = tuple(field.name for field in fields(Tile))


def changes(text: str) -> dict[str, int]:
    """The fields that are named, as in "rows=64 columns=128 swap=0", or an InvalidInputError."""
    found = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in (*_OF_PLANS, *_OF_TILES) or not value.isdigit():
            raise invalid_input(
                "kernel_times",
                got=f"the plan {text!r}",
                needs=f"numbers for some of {', '.join((*_OF_PLANS, *_OF_TILES))}, as in columns=64",
                fix="Take 0 and 1 for swap, tensor_map and arranged.",
            )
        found[name] = int(value)
    return found


def changed(plan: Plan, to: dict[str, int]) -> Plan:
    """The plan with other fields; registers are known of the tile as it was only."""
    whole: dict[str, Any] = {name: value for name, value in to.items() if name in _OF_PLANS}
    if "rows" in whole and plan.ordered:
        whole["block"] = whole["rows"]
    tile: dict[str, Any] = {name: value for name, value in to.items() if name in _OF_TILES}
    tile |= {name: bool(tile[name]) for name in ("swap", "tensor_map", "arranged") if name in tile}
    if tile:
        tile.setdefault("registers", 0)
    return replace(plan, gate_up=replace(plan.gate_up, **tile), down=replace(plan.down, **tile), **whole)


def profiled(calls: Sequence[Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds of each kernel of the calls, by name, in order; memory is written between them."""
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls:
            cold.zero_()
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type.name == "CUDA" and event.name.endswith("_kernel"):
            times[event.name].append(event.device_time)
    return times


def times_of(device: Device, layer: Layer, form: str, num_tokens: int, texts: Sequence[str]) -> list[Row]:
    """A row for the plan that calls get, and one for each change of it: its kernels' medians, and how far it is off."""
    weights = first_checks.in_form(layer, form)
    x, routings = inputs(layer, num_tokens, CALLS)
    target = gpu.device_of(x)
    default = first_checks.choose(layer.spec, form, num_tokens, target)
    rows, expected = [], None
    for text in ("", *texts):
        about: Row = {"layer": layer.spec.name, "format": form, "tokens": num_tokens, "plan": text or "as it is"}
        try:
            how = changed(default, changes(text))
            how = triton_maps.by_pointers(how, weights, triton.compute_dtype(x, weights))
            call = tune.prepared(x, weights, how)
            y = call(x, routings[0], weights).float()
            expected = y if expected is None else expected
            found = profiled([partial(call, x, routing, weights) for routing in routings])
        except failures() as error:
            rows.append({**about, "status": "failed", "reason": sentence(error)})
            continue
        us = {name: median(values) * len(values) / len(routings) for name, values in found.items()}
        off = float((y - expected).norm() / expected.norm())
        read = active_experts(routings[0].expert_ids) * weights.bytes_per_expert
        work = {"bytes": read, "flops": flops(layer.spec, routings[0])}
        found_row = {"status": "ok", "us": us, "total_us": sum(us.values()), "off": off, "how": str(how)}
        rows.append({**about, **found_row, **work})
    return rows


def line(row: Row) -> str:
    """A row for the terminal."""
    head = f"{row['layer']} {row['format']} T={row['tokens']} {row['plan']}:"
    if row["status"] != "ok":
        return f"{head} {row['reason']}"
    kernels = " ".join(f"{name.removesuffix('_kernel')} {us:.1f}" for name, us in row["us"].items())
    rates = f"{row['bytes'] / row['total_us'] / 1e6:.2f} TB/s {row['flops'] / row['total_us'] / 1e6:.0f} TFLOP/s"
    return f"{head} {kernels}, together {row['total_us']:.1f} us, {rates}, off by {row['off']:.1e}"


def numbers(text: str) -> list[int]:
    """Those that stand between commas."""
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None, make_device: Callable[[], Device] = first_points.cuda) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="olmoe", help="names, separated by commas")
    parser.add_argument("--formats", default="dense", help="with the input format behind a slash, separated by commas")
    parser.add_argument("--tokens", type=numbers, default="1,16,4096", help="numbers, separated by commas")
    parser.add_argument("--plans", nargs="*", default=[], help="changes of the plan that calls get")
    parser.add_argument("--json", type=Path, help="file of all rows")
    options = parser.parse_args(arguments)
    reason = goals.missing() if make_device is first_points.cuda else None
    if reason is not None:
        print(f"kernel_times.py: {reason}", file=sys.stderr)
        return REFUSED
    try:
        for text in options.plans:
            changes(text)
        device, tokens, rows = make_device(), options.tokens, []
        for name in options.layers.split(","):
            layer = first_points.make_layer(device, named(name), max(tokens))
            for form in options.formats.split(","):
                for num_tokens in tokens:
                    with torch.inference_mode():
                        found = times_of(device, layer, form, num_tokens, options.plans)
                    print(*map(line, found), sep="\n", flush=True)
                    rows += found
                    if options.json is not None:
                        options.json.write_text(json.dumps(rows, indent=1) + "\n")
                layer.quantized.clear()
    except MoestroError as error:
        print(f"kernel_times.py: {error}", file=sys.stderr)
        return REFUSED
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
