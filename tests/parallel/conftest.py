"""Groups of processes, one of each size for a worker's tests."""

from __future__ import annotations

import pytest

from parallel.ranks import Ranks


@pytest.fixture(scope="package")
def group():
    """Maps a number of ranks to a group of them, which all tests of this size use. They end with this folder's tests.

    Threads of gloo poll while they wait, which other tests would pay for.
    """
    kept: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in kept:
            kept[world] = Ranks(world)
        return kept[world]

    yield of
    for ranks in kept.values():
        ranks.stop()


@pytest.fixture
def fresh():
    """Makes groups that a test may break."""
    made: list[Ranks] = []

    def of(world: int, backend: str | None = "gloo") -> Ranks:
        made.append(Ranks(world, backend))
        return made[-1]

    yield of
    for ranks in made:
        ranks.stop()
