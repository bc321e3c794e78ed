"""What every command has: an example in its help, which can be typed as it stands; `--json` where it ends by itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moestro.cli import app, progress
from test_docs import parse

ROOT: Any = typer.main.get_command(app)
COMMANDS = [
    *([name] for name, command in ROOT.commands.items() if not hasattr(command, "commands")),
    *(["bench", name] for name in ROOT.commands["bench"].commands),
]
GO_ON = ("chat", "serve")
"""Commands that go on until they are ended, and have no result."""


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_has_an_example_that_can_be_typed(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = CliRunner().invoke(app, [*names, "--help"]).stdout
    example = re.search(rf"moestro {' '.join(names)} [^\n,]*(,[^\s,]+[^\n,]*)*", text.partition("For instance:")[2])
    assert example is not None
    parse(ROOT, shlex.split(example[0].strip().rstrip("."))[1:])


@pytest.mark.parametrize("names", [names for names in COMMANDS if names[0] not in GO_ON], ids=" ".join)
def test_results_come_as_json(names: list[str]) -> None:
    command: Any = ROOT
    for name in names:
        command = command.commands[name]
    assert "--json" in [option for parameter in command.params for option in parameter.opts]


def test_what_takes_long_says_so_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, bool]] = []

    @contextmanager
    def watched(text: str, shown: bool) -> Iterator[None]:
        said.append((text, shown))
        yield

    monkeypatch.setattr(progress, "bar", watched)
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal))
        with progress.waiting("replaying"):
            pass
    assert said == [("replaying", True), ("replaying", False)]
