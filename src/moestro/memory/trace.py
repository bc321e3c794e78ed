"""A recorded routing: which experts every token went to, in every expert layer of every forward, kept in a file.

The file is a zip of NumPy arrays (.npz): small, since ids compress well; checked by the zip's own checksums; written in
one piece when the run ends. `FIELDS` says what is in it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import stat
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from moestro.errors import InvalidInputError, invalid_input
from moestro.memory.policy import Ints, Visit, visit_of
from moestro.memory.prompts import MOST_DECODED
from moestro.memory.sizes import LayerSize

VERSION = 1
FIELDS = {
    "header": "JSON as bytes: `version`, `model`, and of each layer `experts`, `top_k`, `expert_bytes`, `pool_key`",
    "layers": "of each visit the layer's index, [visits]",
    "tokens": "of each visit the number of its tokens, [visits]",
    "ids": "expert ids [tokens, top_k] of one visit after the other, in one row; -1 for an empty slot",
}
"""The arrays of a file."""
CSV_COLUMNS = ("step", "layer", "token", "expert")
ROUTE_COLUMNS = ("turn", "phase", "step", "layer", "expert")
"""Of BigMoeOnEdge's route traces: in phase 0 of a turn a step is a token of its prompt, in phase 1 a forward."""
MAX_BYTES = 2**32
MAX_EXPERTS = 2**20
"""Of a layer, and of all layers together: a replay keeps numbers of each."""
_OPERATION = "read_trace"


@dataclass(frozen=True, eq=False)
class Trace:
    """The routing of a run.

    Attributes:
        model: its name.
        layers: of the model.
        at: of each visit the layer, [visits].
        tokens: of each visit, [visits].
        ids: of all visits in a row; a visit has tokens x top_k.
    """

    model: str
    layers: tuple[LayerSize, ...]
    at: Ints
    tokens: Ints
    ids: Ints

    def __post_init__(self) -> None:
        widths = np.array([layer.top_k for layer in self.layers], np.int64)
        if not self.layers or len(self.at) != len(self.tokens) or not _within(self.at, 0, len(self.layers)):
            raise _no_trace(None, "visits of other layers than it names")
        if (count := sum(layer.experts for layer in self.layers)) > MAX_EXPERTS:
            raise _no_trace(None, f"{count:,} experts in {len(self.layers)} layers")
        if (self.tokens < 1).any() or int((widths[self.at] * self.tokens).sum()) != len(self.ids):
            raise _no_trace(None, "visits of other sizes than its ids have")
        experts = np.array([layer.experts for layer in self.layers])
        most = np.repeat(experts[self.at], widths[self.at] * self.tokens)
        if not _within(self.ids, -1, MAX_EXPERTS) or (self.ids >= most).any():
            raise _no_trace(None, "ids of other experts than it names")

    @property
    def visits(self) -> tuple[Visit, ...]:
        """One layer of one forward after the other."""
        found, begin = [], 0
        for layer, tokens in zip(self.at.tolist(), self.tokens.tolist(), strict=True):
            size = self.layers[layer]
            end = begin + tokens * size.top_k
            found.append(visit_of(layer, self.ids[begin:end].reshape(tokens, -1).tolist(), size.experts))
            begin = end
        return tuple(found)

    def layer_ids(self, layer: int) -> Ints:
        """Expert ids [T, K] of all tokens of a layer, one visit after the other.

        Raises:
            InvalidInputError: a layer that there is not.
        """
        if not 0 <= layer < len(self.layers):
            raise invalid_input(
                _OPERATION,
                got=f"layer {layer} of a trace of {len(self.layers)}",
                needs=f"0 to {len(self.layers) - 1}",
                fix="Count the expert layers from 0.",
            )
        widths = np.array([size.top_k for size in self.layers])[self.at] * self.tokens
        ids: Ints = self.ids[np.repeat(self.at == layer, widths)].reshape(-1, self.layers[layer].top_k)
        return ids

    @property
    def decoded(self) -> int:
        """Tokens that the first layer had in visits of decoding."""
        return int(self.tokens[(self.at == 0) & (self.tokens <= MOST_DECODED)].sum())

    @property
    def prompted(self) -> int:
        """Tokens that the first layer had in visits of prompts."""
        return int(self.tokens[(self.at == 0) & (self.tokens > MOST_DECODED)].sum())

    def write(self, path: str | Path) -> None:
        """Write it to a file."""
        header = {"version": VERSION, "model": self.model, "layers": [asdict(layer) for layer in self.layers]}
        with Path(path).open("wb") as file:  # NumPy adds an ending to a name that has none
            np.savez_compressed(
                file,
                header=np.frombuffer(json.dumps(header).encode(), np.uint8),
                layers=self.at.astype(np.int32),
                tokens=self.tokens.astype(np.int32),
                ids=self.ids.astype(np.int32),
            )


class Recorder:
    """Takes visits one by one, and makes a `Trace` of them."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.sizes: dict[int, LayerSize] = {}
        self._at: list[int] = []
        self._tokens: list[int] = []
        self._ids: list[Ints] = []

    def __bool__(self) -> bool:
        """Whether there was a visit."""
        return bool(self._at)

    def add(self, layer: int, size: LayerSize, ids: Ints) -> None:
        """A visit by tokens with these expert ids [T, K]; ids of no expert are empty slots."""
        if not len(ids):
            return
        self.sizes.setdefault(layer, size)
        self._at.append(layer)
        self._tokens.append(len(ids))
        self._ids.append(np.where((ids >= 0) & (ids < size.experts), ids, -1).reshape(-1).astype(np.int32))

    def trace(self) -> Trace:
        """All visits so far, the layers that were visited counted anew from 0.

        Raises:
            InvalidInputError: there was none.
        """
        if not self._at:
            raise invalid_input(
                "trace",
                got=f"{self.model}, which ran no expert layer",
                needs="a run of a Mixture-of-Experts model",
                fix="Generate something.",
            )
        layers = sorted(self.sizes)
        at = np.searchsorted(layers, self._at).astype(np.int64)
        tokens, ids = np.array(self._tokens, np.int64), np.concatenate(self._ids).astype(np.int64)
        return Trace(self.model, tuple(self.sizes[layer] for layer in layers), at, tokens, ids)


def read_trace(path: str | Path, expert_bytes: int | None = None, experts: int | None = None) -> Trace:
    """A trace from a file that `Trace.write` wrote, or from a .csv file.

    Args:
        path: of the file. A .csv file begins with a line that names its columns, among them `CSV_COLUMNS`: forward,
            layer, row of the token in the forward, and an expert of it; or `ROUTE_COLUMNS`. Lines of a step and layer
            are one visit, and visits come in the order of their first lines. Lines that begin with # are passed over.
        expert_bytes: of one expert; a .csv file does not say, another file does.
        experts: of a layer; of a .csv file else one more than the highest id.

    Raises:
        InvalidInputError: a file that cannot be read, is damaged, or holds something else; sizes beside a file that
            says them, or without it.
    """
    path = Path(path)
    as_csv = path.suffix == ".csv"
    if as_csv != (expert_bytes is not None) or (experts is not None and not as_csv):
        raise invalid_input(
            _OPERATION,
            got=f"{str(path)!r} {'without' if as_csv else 'with'} the size of an expert",
            needs="it for a .csv file, and for no other",
            fix="A recorded trace says its own sizes.",
        )
    try:
        if expert_bytes is not None:
            with path.open(newline="", encoding="utf-8") as file:
                lines = csv.DictReader(line for line in file if not line.startswith("#"))
                return _of_lines(path.name, lines, expert_bytes, experts)
        return _of_arrays(_arrays(path))
    except InvalidInputError as error:
        raise _no_trace(path, _reason(error)) from error
    except (*_DAMAGE, csv.Error) as error:
        raise _no_trace(path, str(getattr(error, "strerror", None) or error or type(error).__name__)) from error


_DAMAGE = (
    OSError,
    EOFError,
    MemoryError,  # of a header that claims a shape that no memory holds
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
    RuntimeError,  # of a zip that is encrypted, or compressed in another way
    BadZipFile,
    zlib.error,
)


def _arrays(path: Path) -> dict[str, Any]:
    """The file's arrays, each read whole first, so that its checksum is compared before it is parsed."""
    found = {}
    with path.open("rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise _no_trace(None, "no ordinary file")  # a device or a pipe may have no end
    with ZipFile(path) as file:
        for name in FIELDS:
            member = file.getinfo(f"{name}.npy")
            if member.file_size > MAX_BYTES:
                raise _no_trace(None, f"{name} of {member.file_size:,} bytes")
            found[name] = np.load(io.BytesIO(file.read(member)), allow_pickle=False)
    return found


def _of_arrays(arrays: dict[str, Any]) -> Trace:
    header = json.loads(arrays["header"].tobytes())
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise _no_trace(None, f"version {header.get('version') if isinstance(header, dict) else header!r}")
    at, tokens, ids = (arrays[name] for name in ("layers", "tokens", "ids"))
    if any(not isinstance(a, np.ndarray) or a.ndim != 1 or a.dtype.kind not in "iu" for a in (at, tokens, ids)):
        raise _no_trace(None, "arrays of other shapes")
    layers = tuple(_layer(**layer) for layer in header["layers"])
    return Trace(str(header["model"]), layers, *(a.astype(np.int64) for a in (at, tokens, ids)))


def _layer(experts: int, top_k: int, expert_bytes: int, pool_key: str) -> LayerSize:
    if any(type(value) is not int for value in (experts, top_k, expert_bytes)) or experts > MAX_EXPERTS:
        raise _no_trace(None, f"a layer of {experts!r} experts")
    return LayerSize(experts, top_k, expert_bytes, str(pool_key))


def _of_lines(name: str, lines: csv.DictReader[str], expert_bytes: int, experts: int | None) -> Trace:
    columns = lines.fieldnames or ()
    place = _place if set(CSV_COLUMNS) <= set(columns) else _place_of_route
    if place is _place_of_route and not set(ROUTE_COLUMNS) <= set(columns):
        raise _no_trace(None, f"columns {', '.join(columns)}")
    visits: dict[tuple[tuple[int, ...], int], dict[int, list[int]]] = {}
    for line in lines:
        step, token = place(line)
        layer, expert = int(line["layer"]), int(line["expert"])
        if not 0 <= expert < MAX_EXPERTS:
            raise _no_trace(None, f"expert {expert} in line {lines.line_num}")
        visits.setdefault((step, layer), {}).setdefault(token, []).append(expert)
    if not visits:
        raise _no_trace(None, "no line")
    top_k: dict[int, int] = {}
    for (_, layer), tokens in visits.items():
        top_k[layer] = max(top_k.get(layer, 1), *map(len, tokens.values()))
    most = 1 + max(max(row) for tokens in visits.values() for row in tokens.values())
    count = most if experts is None else experts
    recorder = Recorder(name)
    for (_, layer), tokens in visits.items():
        width = top_k[layer]
        rows = [row + [-1] * (width - len(row)) for _, row in sorted(tokens.items())]
        if max(map(max, rows)) >= count:
            raise _no_trace(None, f"expert {most - 1} where there are {count}")
        recorder.add(layer, LayerSize(max(count, width), width, expert_bytes), np.array(rows, np.int64))
    return recorder.trace()


def _place(line: dict[str, str]) -> tuple[tuple[int, ...], int]:
    """The forward of a line, and its token's row there."""
    return (int(line["step"]),), int(line["token"])


def _place_of_route(line: dict[str, str]) -> tuple[tuple[int, ...], int]:
    turn, phase, step = (int(line[column]) for column in ROUTE_COLUMNS[:3])
    return ((turn, phase), step) if phase == 0 else ((turn, phase, step), 0)


def _within(values: Ints, least: int, beyond: int) -> bool:
    return not len(values) or bool(values.min() >= least and values.max() < beyond)


def merged(traces: Sequence[Trace]) -> Trace:
    """Runs of one model, one after the other.

    Raises:
        InvalidInputError: none, or models of other layers.
    """
    if len({trace.layers for trace in traces}) != 1:
        raise invalid_input(
            "cache",
            got=f"{len(traces)} traces of {len({trace.layers for trace in traces})} models",
            needs="traces of one model",
            fix="Replay each model's by themselves.",
        )
    parts = [np.concatenate([getattr(trace, name) for trace in traces]) for name in ("at", "tokens", "ids")]
    names = dict.fromkeys(trace.model for trace in traces)
    return Trace(", ".join(names), traces[0].layers, *parts)


def _reason(error: InvalidInputError) -> str:
    """What an error got, without the rest of its sentence."""
    return str(error).partition("got ")[2].partition("; needs")[0]


def _no_trace(path: Path | None, why: str) -> InvalidInputError:
    return invalid_input(
        _OPERATION,
        got=why if path is None else f"{str(path)!r} ({why})",
        needs="a trace of version 1, or a .csv file with the columns step, layer, token, expert",
        fix="moestro generate --trace FILE writes one.",
    )
