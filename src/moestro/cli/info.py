"""`moestro info`: what is installed, what this machine is, and what can run on it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.filesize import pick_unit_and_suffix

import moestro
from moestro.cli.progress import named_values, waiting, wide_console
from moestro.cli.refusal import refusals

PACKAGES = ("transformers", "safetensors", "tokenizers", "numpy", "triton")
MEASURED = ("float32", "bfloat16")
INTEGERS = ("vnni", "amx-int8")


def info(
    measure: Annotated[bool, typer.Option("--measure", help="Measure bandwidth and FLOP/s; a few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Versions, processor features, threads, devices, and the implementations of every operation with reasons.

    For instance: moestro info --measure --json
    """
    with refusals(), waiting("measuring" if measure else "asking every implementation"):
        found = collect(measure)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _print(found)


def collect(measure: bool) -> dict[str, Any]:
    """Everything the command shows, as plain values. PyTorch says itself which build it is ("2.13.0+cu130")."""
    import torch

    from moestro import machine

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    versions = {"moestro": moestro.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    others = {name: _version(name) for name in PACKAGES}
    costs = _costs(measure)
    roofs = {name: asdict(machine.measure(getattr(torch, name))) for name in MEASURED} if measure else None
    return {
        "versions": versions | others,
        "machine": machine.describe(),
        "gpus": [machine.describe_gpu(device) for device in gpus],
        "implementations": _implementations("cuda" if gpus else "cpu"),
        "roof": roofs,
        "peaks": machine.peaks() if measure else None,
        "costs": costs,
        "gpu_rates": [{**machine.bandwidths(d), **machine.matrix_rates(d)} for d in gpus] if measure else None,
    }


def _costs(measure: bool) -> dict[str, list[float]]:
    """What was measured on this machine to choose by; if asked, anew, and for two common formats now."""
    import torch

    from moestro import Routing, formats, settings
    from moestro.ops import measured
    from moestro.ops.expert_mlp import costs, cpu

    if measure and settings.MEASURES:
        measured.forget()
        x = torch.zeros(1, costs.COMMON_COLUMNS, dtype=torch.bfloat16)
        routing = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        for name in ("bfloat16", "mxfp4"):
            with torch.no_grad():
                weights = costs.sample(formats.find_format(name), costs.COMMON_COLUMNS, "float")
                cpu.predictions(x, routing, weights)
                if cpu.too_busy(x, routing, weights):
                    typer.echo(f"{name}: not kept, as threads waited for cores; measure again later", err=True)
    return measured.read()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _implementations(device: str) -> dict[str, list[dict[str, str | None]]]:
    """Every implementation in order of priority; reason is None if it runs a small call on the device, in
    float32, of attention and a projection in bfloat16."""
    import torch

    from moestro import ExpertWeights, Routing
    from moestro.ops import dispatch
    from moestro.routing import Scoring

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    ids = zeros(4, 2, dtype=torch.int64)
    weights = ExpertWeights.from_dense(zeros(8, 32, 16), zeros(8, 16, 16))
    heads = zeros(1, 2, 3, 16, dtype=torch.bfloat16)
    calls: dict[str, tuple[Any, ...]] = {
        "attention": (heads[:, :, 0], heads, heads, 1.0, None, None),
        "expert_mlp": (zeros(4, 16), Routing(ids, zeros(4, 2)), weights, "auto"),
        "grouping": (ids, 8),
        "projection": (zeros(4, 16, dtype=torch.bfloat16), zeros(8, 16, dtype=torch.bfloat16), None),
        "route": (zeros(4, 8), 2, Scoring(), None, None),
        "topk": (zeros(4, 8), 2),
    }
    return {
        operation.name: [
            {"name": name, "reason": found if isinstance(found, str) else None}
            for name, found in dispatch.candidates(operation, *calls[operation.name]).items()
        ]
        for operation in dispatch.operations()
    }


def _print(found: dict[str, Any]) -> None:
    rows = [line for group, own in _rows(found).items() for line in [(group, ""), *((f"  {n}", v) for n, v in own)]]
    wide_console().print(named_values(rows))


def _rows(found: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    missing = {"triton": "not installed: the kernels for NVIDIA GPUs need it"}
    versions = [(name, value or missing.get(name, "not installed")) for name, value in found["versions"].items()]
    rows = {"versions": versions, "machine": _lines(found["machine"])}
    for i, gpu in enumerate(found["gpus"]):
        rates = found["gpu_rates"][i] if found["gpu_rates"] else {}
        rows[f"cuda:{i}"] = _lines(gpu) + [
            (name, f"{rate / 1e12:,.0f} TFLOP/s" if name.endswith("-mm") else f"{rate / 1e9:,.0f} GB/s")
            for name, rate in rates.items()
        ]
    for operation, entries in found["implementations"].items():
        rows[f"implementations of {operation}, first to last"] = [
            (entry["name"], entry["reason"] or "ready") for entry in entries
        ]
    rows["measured, to choose and to plan by"] = [
        (name, _numbers(name, numbers)) for name, numbers in found["costs"].items()
    ] or [("nothing yet", "a layer measures what it needs when it first runs, and so does --measure")]
    if found["roof"] is None:
        return rows | {"roof": [("not measured", "moestro info --measure")]}
    roofs = [
        (name, f"{roof['bytes_per_second'] / 1e9:.1f} GB/s, {roof['flops_per_second'] / 1e9:.0f} GFLOP/s")
        for name, roof in found["roof"].items()
    ]
    peaks = [
        (name, f"{rate / 1e9:,.0f} {'GOP/s' if name in INTEGERS else 'GFLOP/s'}")
        for name, rate in found["peaks"].items()
    ]
    none = [("not measured", "the native engine is not there, or has no loops for this processor")]
    return rows | {"roof": roofs, "peaks from registers": peaks or none}


def _numbers(name: str, numbers: list[float]) -> str:
    """What was measured under a name, in a few words."""
    if name.startswith("beside the experts"):  # three parts of a prompt's pass, and of a step; others' share
        return f"prompt {1e3 * sum(numbers[:3]):,.1f} ms, a step {1e3 * sum(numbers[3:6]):,.1f} ms"
    if name.endswith("add up"):  # `moestro.parallel.links.Link`
        return f"{numbers[0] / 1e9:,.2f} GB/s, {1e6 * numbers[1]:,.0f} us a message"
    if len(numbers) > 1:
        return f"{len(numbers)} numbers, {1e12 * min(numbers[1:]):,.0f} ps a weight at the least"
    return f"{numbers[0] / 1e9:,.1f} GB/s" if name.endswith("read") else f"{numbers[0]:,.0f}"


def _lines(device: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a machine or a GPU for people: bytes in units, lists in a line."""

    def text(name: str, value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {text(name, part)}" for key, part in value.items())
        if isinstance(value, list):
            return ", ".join(value) or "none"
        if not name.endswith("bytes"):
            return str(value)
        unit, suffix = pick_unit_and_suffix(value, ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024)
        return f"{value / unit:.1f} {suffix}"

    return [(name.removesuffix("_bytes").replace("_", " "), text(name, value)) for name, value in device.items()]
