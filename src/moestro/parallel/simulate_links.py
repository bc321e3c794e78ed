"""The links of a mesh that is not there, and the rows that travel over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moestro.errors import invalid_input

Ints = NDArray[np.int64]
Links = Literal["ring", "line", "switch"]
MAX_SIZE = 4096
"""Of rows and of columns."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in rows and columns; rank ``row * columns + column``. Tokens are divided evenly among rows.

    Attributes:
        rows, columns: numbers of ranks.
        links: between the rows of a column: "ring" and "line" join neighbours, in both directions, a "switch" every
            rank with every other.
        bytes_per_second: of a link, in each direction.
        hop_seconds: for one link, whatever the bytes.

    Raises:
        InvalidInputError: a size below 1 or above 4,096, other links, a bandwidth or a time that is not positive.
    """

    rows: int
    columns: int = 1
    links: Links = "ring"
    bytes_per_second: float = 12.5e9
    hop_seconds: float = 1e-6

    def __post_init__(self) -> None:
        rates = 0 < self.bytes_per_second < float("inf") and 0 <= self.hop_seconds < float("inf")
        sizes = 1 <= self.rows <= MAX_SIZE and 1 <= self.columns <= MAX_SIZE
        if not sizes or self.links not in get_args(Links) or not rates:
            raise invalid_input(
                "Mesh",
                got=str(self),
                needs=f"1 to {MAX_SIZE} rows and columns, ring, line or switch, and finite rates above 0",
                fix='Mesh(4, 8) is four rows of eight; Mesh(320, links="switch") one column.',
            )

    @classmethod
    def parse(cls, text: str, links: Links = "ring", bytes_per_second: float = 12.5e9, hop: float = 1e-6) -> Mesh:
        """From "ROWSxCOLUMNS" or "ROWS".

        Raises:
            InvalidInputError: another text.
        """
        parts = text.split("x")
        if len(parts) > 2 or not all(part.isdecimal() for part in parts):
            raise invalid_input("Mesh", got=repr(text), needs="ROWSxCOLUMNS or ROWS", fix="Try 4x8, or 32.")
        return cls(int(parts[0]), int(parts[-1]) if len(parts) == 2 else 1, links, bytes_per_second, hop)

    @property
    def num_ranks(self) -> int:
        return self.rows * self.columns

    def __str__(self) -> str:
        rate = f"{self.bytes_per_second / 1e9:g} GB/s and {self.hop_seconds * 1e6:g} us a hop"
        return f"{self.rows}x{self.columns} {self.links} with {rate}"

    def distances(self, row: int = 0) -> Ints:
        """Hops from a row to each, [rows]."""
        away = np.abs(np.arange(self.rows) - row)
        if self.links == "line":
            return away
        return np.minimum(away, self.rows - away if self.links == "ring" else 1)


@dataclass(frozen=True)
class Traffic:
    """Rows on their way to experts and back.

    Attributes:
        out, back: half rows over each link, [columns, rows, 2]: to the next row and to the one before; on a switch out
            of the rank and into it.
        held: rows that each rank holds, [ranks].
        sent: (token, rank) that are not on the token's own rank.
        mean_hops, max_hops: of a (token, rank); one that stays has none.
    """

    out: Ints
    back: Ints
    held: Ints
    sent: int
    mean_hops: float
    max_hops: int


def traffic(home: Ints, sends: tuple[Ints, Ints], mesh: Mesh, multicast: bool) -> Traffic:
    """Each token once to each rank that holds one of its experts, and one row back.

    Args:
        home: the row that each token begins on, [T].
        sends: token and rank of each row that travels, without repetition.
        multicast: whether ranks on the way pass a row on; else each is sent from the token's own.
    """
    token, row, column = sends[0], sends[1] // mesh.columns, sends[1] % mesh.columns
    hops = mesh.distances()[np.abs(row - home[token])]
    out, back = [], []
    for one in range(mesh.columns):
        own = column == one
        here, there = home[token[own]], row[own]
        back.append(_unicast(there, here, mesh))
        passed_on = multicast and mesh.links != "switch"
        out.append(_multicast(token[own], home, there, mesh) if passed_on else _unicast(here, there, mesh))
    held = np.bincount(sends[1], minlength=mesh.num_ranks)
    mean = float(hops.mean()) if len(hops) else 0.0
    return Traffic(np.stack(out), np.stack(back), held, int((hops > 0).sum()), mean, int(hops.max(initial=0)))


def traffic_to_all(home: Ints, mesh: Mesh) -> Traffic:
    """Every token to every row of its column, and its sum back, added up on the way: buffers of a fixed size."""
    rows = np.arange(mesh.rows)
    own = np.bincount(home, minlength=mesh.rows)
    distances = np.stack([mesh.distances(row) for row in range(mesh.rows)])
    if mesh.links == "switch":
        out = 2 * np.stack([own * (mesh.rows - 1), len(home) - own], 1)
        back = out[:, ::-1]
    else:  # one token for each row, which stands for all of the row's
        out = _multicast(np.repeat(rows, mesh.rows), rows, np.tile(rows, mesh.rows), mesh, own)
        back = np.stack([np.roll(out[:, 1], -1), np.roll(out[:, 0], 1)], 1)  # the same links, the other way
    mean = float(distances.mean(1) @ own / len(home))
    sent = len(home) * (mesh.rows - 1) * mesh.columns
    held = np.full(mesh.num_ranks, len(home))
    both = [np.broadcast_to(way, (mesh.columns, mesh.rows, 2)) for way in (out, back)]
    return Traffic(both[0], both[1], held, sent, mean, int(distances.max()))


def _multicast(token: Ints, home: Ints, there: Ints, mesh: Mesh, times: Ints | None = None) -> Ints:
    """Half rows over each link of a column, [rows, 2], if each token travels once in each direction as far as it must.

    On a ring the row opposite receives one half from each side. A token counts as `times` many.
    """
    rows, here = mesh.rows, home[token]
    forward, backward = (np.zeros(len(home), np.int64) for _ in range(2))
    ahead, behind, opposite = _ways(here, there, mesh)
    np.maximum.at(forward, token, ahead)
    np.maximum.at(backward, token, behind)
    halved = np.unique(token[opposite])
    far, some = np.full(len(halved), rows // 2), None if times is None else times[halved]
    found = []
    for reach, direction in ((forward, 1), (backward, -1)):
        whole = _cover(home, reach, rows, direction, times)
        half = _cover(home[halved], far, rows, direction, some)
        found.append(2 * whole + half - _cover(home[halved], reach[halved], rows, direction, some))
    return np.stack(found, 1)


def _unicast(here: Ints, there: Ints, mesh: Mesh) -> Ints:
    """Half rows over each link of a column, [rows, 2], if each row travels by itself, the shortest way."""
    rows = mesh.rows
    if mesh.links == "switch":
        away = here != there
        return np.stack([np.bincount(side[away], minlength=rows) for side in (here, there)], 1) * 2
    ahead, behind, opposite = _ways(here, there, mesh)
    far = np.full(int(opposite.sum()), rows // 2)
    return np.stack(
        [
            2 * _cover(here, reach, rows, direction) + _cover(here[opposite], far, rows, direction)
            for reach, direction in ((ahead, 1), (behind, -1))
        ],
        1,
    )


def _ways(here: Ints, there: Ints, mesh: Mesh) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Hops ahead and hops back, one of them 0, and which rows lie opposite on a ring, with both 0."""
    away = there - here
    if mesh.links == "line":
        return np.maximum(away, 0), np.maximum(-away, 0), np.zeros(len(away), bool)
    away = away % mesh.rows
    opposite = 2 * away == mesh.rows
    ahead = np.where(2 * away < mesh.rows, away, 0)
    return ahead, np.where(2 * away > mesh.rows, mesh.rows - away, 0), opposite


def _cover(start: Ints, reach: Ints, rows: int, direction: int, times: Ints | None = None) -> Ints:
    """How many journeys of so many hops go over the link that leaves each row in a direction, [rows]."""
    begins = start if direction > 0 else -start % rows
    found = np.bincount(begins * (rows + 1) + reach, weights=times, minlength=rows * (rows + 1)).astype(np.int64)
    longer = found.reshape(rows, rows + 1)[:, ::-1].cumsum(1)[:, ::-1][:, 1:]  # [start, k]: that go over k hops
    hops = np.arange(rows)
    over: Ints = longer[(hops[:, None] - hops) % rows, hops].sum(1)
    return over if direction > 0 else over[-hops % rows]
