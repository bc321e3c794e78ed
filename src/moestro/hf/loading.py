"""`load`: a model whose experts stay where their checkpoint has them, or are quantised as they are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from moestro.checkpoint import open_checkpoint
from moestro.errors import invalid_input
from moestro.hf.config import MoestroConfig
from moestro.hf.memory import placed
from moestro.hf.models import explained, find_device, find_model, fitting, read_config
from moestro.hf.sharding import cut_over
from moestro.hf.sources import model_class, take_quantization
from moestro.memory.budget import DeviceMemory, MemoryBudget
from moestro.types import InputFormat

OPERATION = "load"


class Memory(TypedDict, total=False):
    """What `load` takes by name only."""

    memory: int | str | MemoryBudget | None
    device_memory: int | str | DeviceMemory | None


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(
    path_or_id: str | Path,
    format: str | MoestroConfig | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | DeviceMesh | None = None,
    input_format: InputFormat | None = None,
    projections: str | None = None,
    **memory: Unpack[Memory],
) -> PreTrainedModel:
    """Load a Transformers model and let moestro serve its experts, without ever holding them in full precision.

    Experts that a checkpoint stores in a format moestro reads (bfloat16, float16 or float32, one by one or stacked;
    block FP8; MXFP4; those that ``moestro quantize`` writes) are memory-mapped: files are read as experts are used.

    Args:
        path_or_id: a folder written by save_pretrained or in its publisher's layout, or a hub id.
        format: quantise experts to this format while they are read (`moestro.formats.FORMATS` lists the names); None
            leaves them as they are stored. A `MoestroConfig` says that and more: how scales are searched for, and
            formats by layer and by projection.
        dtype: of all other weights and of the activations ("float32", torch.bfloat16, ...); the checkpoint's if None.
            FP8 weights outside the experts become this dtype.
        device: where the model goes; the CPU if None. A mesh of `moestro.parallel.make_mesh` cuts the experts over its
            ranks, of which all but those along dp run the same tokens: along ep each reads and keeps some of the
            experts, along tp a slice of each. All else is on every rank.
        input_format: "int8" to round what meets the experts' weights to 8 bits, row by row, and multiply integers; for
            experts in int8, int4, mxfp4, nvfp4 or fp4. "fp8-e4m3" the same with 8-bit floats, for experts in
            fp8-e4m3-*. It is not saved. None for what `format` says, else "float".
        projections: the linear modules (attention, shared experts, the head): "torch" leaves them to PyTorch, "auto"
            has the engine run those of 16 bits where it is faster and no gradient is asked for. A format's name, as
            "int8", stores their weights so, but for routers; such a model is not saved. None is as in `format`.
        memory: bytes that all experts together may take, a number or "8GB", or a `moestro.memory.MemoryBudget`; others
            are read from their files as they are needed. None maps the files.
        device_memory: beside it, of a GPU that computes: a number, "6GB" or a `moestro.memory.DeviceMemory`.

    Returns:
        The model in eval mode. Its state dict holds the experts as stored, and save_pretrained writes them so.

    Raises:
        InvalidInputError: files that are damaged, lack weights or are no safetensors files; an unknown format,
            input_format, dtype or device; a format that cannot store the experts' shapes; too little memory.
        UnsupportedError: a dense model, a family whose experts cannot be stored this way, another quantisation, an
            input_format that the experts' format does not take; a mesh that cuts experts more often than they can be.
        CollectiveError: ranks of the mesh that load something else, or that do not come.
    """
    wanted = _asked(format, {"input_format": input_format, "projections": projections, **memory})
    mesh, place = _destination(device, wanted)
    _check_dtype(dtype)
    source = find_model(path_or_id, OPERATION)
    found = open_checkpoint(Path(source)) if Path(source).is_dir() else None  # first, for it finds what is damaged
    config = read_config(source, OPERATION, found)
    own = _with_kept(wanted, take_quantization(config))
    readable = explained(OPERATION, source, "readable weights in safetensors form", "Download or save the model again.")
    room = partial(fitting, OPERATION, source, dtype if dtype not in (None, "auto") else config.dtype, own.format)
    with readable, room(), cut_over(mesh):
        model, report = model_class(config).from_pretrained(
            source, config=config, quantization_config=own, dtype=dtype or "auto", output_loading_info=True
        )
    check_complete(path_or_id, report)
    with room():
        return model if place is None else model.to(place)


def _destination(
    device: torch.device | str | DeviceMesh | None, wanted: MoestroConfig
) -> tuple[DeviceMesh | None, torch.device | None]:
    """The mesh, if it is one, and where the model goes; None where nobody says. The budget gets its device."""
    mesh = device if isinstance(device, DeviceMesh) else None
    named = device.device_type if isinstance(device, DeviceMesh) else device
    place = None if named is None else find_device(named, OPERATION)
    if wanted.memory is not None and mesh is None:
        wanted.memory, place = placed(wanted.memory, place)
    return mesh, place


def _asked(format: str | MoestroConfig | None, options: dict[str, Any]) -> MoestroConfig:
    """All that was asked for, as one configuration of its own."""
    if unknown := options.keys() - {"input_format", "projections", "memory", "device_memory"}:
        raise invalid_input(OPERATION, got=f"{min(unknown)}=", needs="an argument that there is", fix="See its page.")
    given = format if isinstance(format, MoestroConfig) else MoestroConfig(format)
    found = MoestroConfig(**vars(given) | {name: value for name, value in options.items() if value is not None})
    if found.search != "nearest" and found.changes_nothing:
        raise invalid_input(
            OPERATION,
            got=f"search={found.search!r} without a format",
            needs="a format whose scales are to be chosen",
            fix="Name one, or leave search out.",
        )
    return found


def _check_dtype(dtype: torch.dtype | str | None) -> None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and found not in DTYPES:
        raise invalid_input(
            OPERATION,
            got=f"dtype={dtype!r}",
            needs=f"one of {', '.join(str(known).removeprefix('torch.') for known in DTYPES)}, or None",
            fix="It is that of weights outside the experts; the experts' is named by format.",
        )


def check_complete(path_or_id: str | Path, report: dict[str, Any]) -> None:
    """Refuse a checkpoint of which Transformers reports that it lacks weights."""
    if lost := [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]:
        raise invalid_input(
            OPERATION,
            got=f"{path_or_id} without {len(lost)} weights of the model, or with them in other shapes: {min(lost)}",
            needs="every weight of the architecture",
            fix="Download or save the checkpoint again.",
        )


def _with_kept(wanted: MoestroConfig, source: MoestroConfig) -> MoestroConfig:
    """What was asked for, and what the checkpoint's own configuration says of the rest."""
    kept: dict[str, Any] = {"rest": source.rest}
    if wanted.changes_nothing:
        kept |= {"format": source.format, "search": source.search, "overrides": source.overrides}
    found = MoestroConfig(**vars(wanted) | kept)
    found.source, found.complete = source, True
    return found
