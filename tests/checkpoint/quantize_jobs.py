"""A small checkpoint with every kind of tensor, jobs on it, and a process that is killed while it runs one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.files import parts
from moestro.checkpoint import Checkpoint, ExpertSource, open_checkpoint
from moestro.checkpoint.quantize import Job, Progress, quantize_checkpoint
from moestro.checkpoint.scheme import Scheme
from moestro.errors import InvalidInputError
from moestro.formats import SplitTensor, dense

E, H, LAYERS = 3, 64, 3
I = 96  # noqa: E741 (the shape legend's letter)
CONFIG = {"model_type": "test", "num_experts": E, "architectures": ["Ä"]}
OTHERS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "generation_config.json": b"{}",
    "README.md": "# Modell mit Ümlaut\n".encode(),
    "modeling_test.py": b"x = 1\n",
    "additional_chat_templates/tools.jinja": b"{{ x }}",
}
NOT_COPIED = {
    "pytorch_model.bin": b"weights",
    "pytorch_model.bin.index.json": b"{}",
    "moestro-checksums.json": None,
    ".cache/lock": b"",
    "original/consolidated.safetensors": b"",
}


def experts_of(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def make_source(folder: Path, hidden: int = H) -> Path:
    """Two layers with stacked experts and one with each expert's projections apart, in three files with an index."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 8).to(dtype)

    tensors = {"model.embed_tokens.weight": draw(40, hidden), "model.norm.weight": draw(hidden, dtype=torch.float32)}
    for i in range(LAYERS):
        tensors[f"model.layers.{i}.mlp.gate.weight"] = draw(E, hidden, dtype=torch.float32)
        tensors[f"model.layers.{i}.self_attn.o_proj.weight"] = draw(hidden, hidden).to(torch.float8_e4m3fn)
        tensors[f"model.layers.{i}.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)
        tensors[f"model.layers.{i}.steps"] = torch.tensor(i)
        if i < LAYERS - 1:
            tensors[f"{experts_of(i)}.gate_up_proj"] = draw(E, 2 * I, hidden)
            tensors[f"{experts_of(i)}.down_proj"] = draw(E, hidden, I)
            continue
        for e in range(E):
            tensors[f"{experts_of(i)}.{e}.gate_proj.weight"] = draw(I, hidden)
            tensors[f"{experts_of(i)}.{e}.up_proj.weight"] = draw(I, hidden)
            tensors[f"{experts_of(i)}.{e}.down_proj.weight"] = draw(hidden, I)
    folder.mkdir(parents=True)
    names = sorted(tensors)
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, content in {**OTHERS, **NOT_COPIED}.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


def sources_of(checkpoint: Checkpoint) -> Iterator[ExpertSource]:
    """The experts, as reading them through a model would find them."""
    for i in range(LAYERS):
        stacked = f"{experts_of(i)}.gate_up_proj"
        for projection, apart in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            target = f"{experts_of(i)}.{projection}"
            if stacked in checkpoint.names:
                yield ExpertSource(target, dense(checkpoint.tensor(target)), (target,))
                continue
            names = [[f"{experts_of(i)}.{e}.{part}.weight" for part in apart] for e in range(E)]
            blocks = tuple(tuple(dense(checkpoint.tensor(name)) for name in expert) for expert in names)
            yield ExpertSource(target, SplitTensor(blocks), tuple(name for expert in names for name in expert))


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(job: Job) -> re.Match[str]:
    """The parts of the error that the job raises; nothing is left of it on the disk."""
    before = sorted(job.destination.parent.iterdir())
    with pytest.raises(InvalidInputError) as caught:
        quantize_checkpoint(job)
    assert sorted(job.destination.parent.iterdir()) == before
    return parts(caught.value)


def make_job(source: Path, destination: Path, scheme: Scheme | None = None, **more: object) -> Job:
    checkpoint = open_checkpoint(source)
    scheme = scheme or Scheme("mxfp4")
    return Job(source, checkpoint, list(sources_of(checkpoint)), destination, scheme, **more)  # type: ignore[arg-type]


def many_files(source: Path, destination: Path) -> Job:
    """A job that writes a file for each projection and each other tensor, and checksums."""
    return make_job(source, destination, Scheme("int4-g32", {"*.layers.1.*": "mxfp4"}), shard_bytes=1, checksums=True)


def kill_until_done(source: Path, destination: Path, seed: int) -> list[int]:
    """Start the job in new processes and kill each after a random time, until one ends by itself.

    Returns the number of tensor bytes that each of the killed ones had met as finished.
    """
    rng = random.Random(seed)
    met = []
    for attempt in range(1000):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _run_slowly(source, destination, writer)
        os.close(writer)
        first = os.read(reader, 8)  # waits until the folder is about to be written
        time.sleep(rng.uniform(0, 0.04 + 0.005 * attempt))
        if os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(reader)
        if not first:  # it found the folder complete
            return met
        met.append(int.from_bytes(first, "little"))
    raise AssertionError("it never came to an end")


def _run_slowly(source: Path, destination: Path, writer: int) -> None:
    told = False

    def on_progress(progress: Progress) -> None:
        nonlocal told
        if not told:
            os.write(writer, progress.written.to_bytes(8, "little"))
        told = True
        time.sleep(0.001)

    try:
        quantize_checkpoint(many_files(source, destination), on_progress)
    finally:
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(kill_until_done(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
