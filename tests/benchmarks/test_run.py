"""benchmarks/run.py on CPUs: what a run leaves behind that is broken off."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from moestro.bench import LayerSpec, measure
from moestro.bench.point import Point
from moestro.bench.records import Row
from moestro.machine import Roof

OPTIONS = ("--layers", "olmoe", "--dtypes", "float32", "--peers", "eager", "--seconds", "1e-4", "--tokens", "1,5")


def pages(folder: Path, name: str) -> tuple[dict[str, object], str]:
    """The only two files of a folder."""
    assert len(list(folder.iterdir())) == 2
    [found], [text] = folder.glob(f"*-{name}.json"), folder.glob(f"*-{name}.md")
    return json.loads(found.read_text()), text.read_text()


@pytest.fixture
def options(
    command: ModuleType,
    tiny: Callable[[str], LayerSpec],
    known_roof: Roof,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> list[str]:
    monkeypatch.setattr(command, "named", tiny)
    monkeypatch.setattr(command, "roofline", lambda report, path: None)
    return [*OPTIONS, "--results", str(tmp_path)]


def test_a_run_that_is_broken_off_leaves_the_points_before(
    command: ModuleType,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = measure.run_point

    def stopped(point: Point, *rest: object) -> list[Row]:
        if point.place.num_tokens == 5:
            raise KeyboardInterrupt
        return whole(point, *rest)

    monkeypatch.setattr(measure, "run_point", stopped)
    assert command.main(options) == 130
    assert capsys.readouterr().err.endswith("-layers-unfinished.md\n")
    found, text = pages(tmp_path, "layers-unfinished")
    assert {row["num_tokens"] for row in found["points"]} == {1}
    assert command.NOT_ENDED in found["notes"]
    assert command.NOT_ENDED in text
    assert found["command"].startswith("python benchmarks/run.py")


def test_a_run_that_ends_leaves_its_own_pages_only(command: ModuleType, options: list[str], tmp_path: Path) -> None:
    assert command.main(options) == 0
    found, text = pages(tmp_path, "layers")
    assert {row["num_tokens"] for row in found["points"]} == {1, 5}
    assert command.NOT_ENDED not in text
    assert found["notes"].count(command.NOT_ENDED) == 0


@pytest.mark.parametrize("tokens", ["a", "1,", "1;2", "-1"])
def test_tokens_that_are_no_numbers_are_named(command: ModuleType, capsys: pytest.CaptureFixture[str], tokens) -> None:
    assert command.main([f"--tokens={tokens}"]) == 2
    assert f"--tokens {tokens}: it takes numbers" in capsys.readouterr().err
