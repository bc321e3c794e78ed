"""Run as a script: top-k, routers and grouping of the native module are called with wrong codes, sizes and addresses.

As `fuzz_binding`: an address is null or that of a buffer that any sizes drawn here stay within, and each call must
compute or refuse. What it prints counts both.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moestro.ops import native

SIZE = 1 << 20
BUFFERS = [ctypes.create_string_buffer(SIZE) for _ in range(6)]
VALUES, *OUT = (ctypes.addressof(buffer) for buffer in BUFFERS)
IDS = (ctypes.c_int64 * 512)()

CODES = (-1, 4, 8, 1 << 31, -(1 << 31), 1 << 40)
SIZES = (-(1 << 62), -8, -1, 0, 1, 3, 17, 1 << 16, (1 << 16) + 1, 1 << 31, 1 << 40, 1 << 62)
PLACES = (
    "address",
    "dtype",
    "tokens",
    "experts",
    "k",
    "out",
    "threads",
    "code",
    "groups",
    "kept",
    "best",
    "ids",
    "blocks",
)

seen: collections.Counter[str] = collections.Counter()
Pick = Callable[[str, Any, tuple[Any, ...]], Any]


def threads(pick: Pick) -> int:
    return pick("threads", 2, (-1, 0, 1 << 20, 1 << 31))


def scores(pick: Pick, dtype: int) -> tuple[int, int, int, int, int]:
    for i in range(4096):
        BUFFERS[0][i] = (i * 37 % 64).to_bytes(1, "little")  # small numbers of any dtype
    tokens = pick("tokens", 3, (-1, 0, 1 << 40, 1 << 62))
    return (
        pick("address", VALUES, (0,)),
        pick("dtype", dtype, CODES),
        tokens,
        pick("experts", 24, SIZES[:7] + SIZES[8:]),
        24,
    )


def topk(pick: Pick, draw: Callable[..., Any]) -> None:
    native.module.topk(
        *scores(pick, draw(st.integers(0, 3))), pick("k", 5, SIZES), pick("out", OUT[0], (0,)), threads(pick)
    )


def route(pick: Pick, draw: Callable[..., Any]) -> None:
    router = native.module.Router(
        score=pick("code", draw(st.integers(0, 1)), CODES),
        select_on_logits=draw(st.booleans()),
        renormalize=draw(st.booleans()),
        epsilon=draw(st.sampled_from((0.0, 1e-20))),
        floor=1e-38,
        scale=2.5,
        logit_scale=draw(st.sampled_from((1.0, -1.0, float("nan")))),
    )
    groups = native.module.Groups(
        num_groups=pick("groups", draw(st.sampled_from((1, 4))), SIZES),
        top_groups=pick("kept", 1, SIZES),
        best=pick("best", 2, SIZES),
        excluded=draw(st.sampled_from((0.0, float("-inf")))),
    )
    address, _, *sizes = scores(pick, 0)
    correction = draw(st.sampled_from((0, VALUES)))
    out = pick("out", OUT[0], (0,)), pick("out", OUT[1], (0,))
    groups = draw(st.sampled_from((groups, None)))
    native.module.route(router, groups, address, *sizes, pick("k", 5, SIZES), correction, *out, threads(pick))


def slots(pick: Pick, draw: Callable[..., Any]) -> tuple[int, bool, int, int, int]:
    for i in range(len(IDS)):
        IDS[i] = pick("ids", i % 4 - 1, (-2, -1, 3, 1 << 31, -(1 << 62))) if i < 9 else -1
    return (
        pick("address", ctypes.addressof(IDS), (0,)),
        draw(st.booleans()),
        pick("tokens", 3, (-1, 0, 1 << 40, 1 << 62)),
        pick("k", 3, (-1, 0, 1 << 40, 1 << 62)),
        pick("experts", 4, SIZES),
    )


def outputs(pick: Pick) -> tuple[int, ...]:
    return tuple(pick("out", address, (0, address)) for address in OUT[:4])


def group(pick: Pick, draw: Callable[..., Any]) -> None:
    native.module.group(*slots(pick, draw), *outputs(pick), threads(pick))


def schedule(pick: Pick, draw: Callable[..., Any]) -> None:
    blocks = pick("blocks", 8, (-1, 0, 1, 2, 1 << 31, 1 << 62)), pick("blocks", 4, (-1, 0, 1, 1 << 31, 1 << 62))
    native.module.schedule(*slots(pick, draw), *blocks, *outputs(pick))


def fits(pick: Pick, draw: Callable[..., Any]) -> None:
    native.module.fits(*slots(pick, draw), draw(st.sampled_from((0, VALUES))))


@settings(max_examples=1000, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), wrong=st.sets(st.sampled_from(PLACES), max_size=3))
def fuzz(data: st.DataObject, wrong: set[str]) -> None:
    """Arguments that fit but for what the places of `wrong` stand for."""

    def pick(place: str, right: Any, others: tuple[Any, ...]) -> Any:
        return data.draw(st.sampled_from(others)) if place in wrong else right

    call = data.draw(st.sampled_from((topk, route, group, schedule, fits)))
    try:
        call(pick, data.draw)
        seen[f"{call.__name__}: computed"] += 1
    except (ValueError, TypeError) as error:
        seen[f"{call.__name__}: {type(error).__name__} {error}".partition("(")[0]] += 1


if __name__ == "__main__":
    fuzz()
    for name, count in sorted(seen.items()):
        print(f"{count:6} {name}")
