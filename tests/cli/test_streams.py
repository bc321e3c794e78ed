"""What a command says and how it ends when its streams, its arguments' bytes or the user's patience run out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moestro.cli import progress
from moestro.cli.streams import BROKEN_PIPE

MOESTRO = f"{sys.executable} -m moestro"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash; the exit code is that of moestro, wherever it stands in a pipe."""
    line = f"set -o pipefail; {command}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, env={**os.environ, **environment}, timeout=240, check=False
    )


def refused(done: subprocess.CompletedProcess[bytes], says: str) -> None:
    assert done.returncode == 2, done
    (line,) = done.stderr.decode().splitlines()
    assert says in line
    assert "; needs " in line


@pytest.mark.parametrize("command", ["--version", "info"])
def test_a_closed_standard_output(command: str, forked: str) -> None:
    refused(shell(f"{forked} {command} >&-"), "got a closed standard output")


def test_both_streams_closed(forked: str) -> None:
    """By itself, and as the other tests of this file start it."""
    for start in (MOESTRO, forked):
        assert shell(f"{start} --version >&- 2>&-").returncode == 2


@FULL
@pytest.mark.parametrize("command", ["--version", "info", "info --json"])
def test_a_full_device(command: str, forked: str) -> None:
    refused(shell(f"{forked} {command} >/dev/full"), "standard output that cannot be written (No space left on device)")


@FULL
def test_text_onto_a_full_device(model_folder: Path, forked: str) -> None:
    refused(shell(f"{forked} generate abc --model {model_folder} >/dev/full"), "cannot be written (No space left")


@pytest.mark.parametrize("command", ["info --json", "info", "generate abc --model {folder}", "--help"])
def test_a_reader_that_leaves(command: str, model_folder: Path, tmp_path: Path, forked: str) -> None:
    left = tmp_path / "left"
    run = f"until [ -e {left} ]; do :; done; {forked} {command.format(folder=model_folder)}"
    done = shell(f"{{ {run}; }} > >(exec 0<&-; : >{left}; sleep 0.1)", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, b""), done


def test_a_pipe_that_is_cut(model_folder: Path, forked: str) -> None:
    done = shell(f"{forked} generate abc --model {model_folder} | head -c 1")
    assert done.returncode in (0, BROKEN_PIPE), done
    assert done.stdout == b"a"
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_quantize_finishes_without_a_reader(model_folder: Path, tmp_path: Path, forked: str) -> None:
    done = shell(f"{forked} quantize {model_folder} {tmp_path / 'q'} --format int8 | true")
    assert done.returncode in (0, BROKEN_PIPE), done
    assert done.stderr == b""
    assert (tmp_path / "q" / "config.json").is_file()


def test_bytes_that_are_no_text(forked: str) -> None:
    refused(shell(rf"{forked} generate $'\xff\xfe'"), "bytes that are no text")
    refused(shell(rf"printf '\xff\xfe' | {forked} generate -"), "bytes that are no text")
    refused(shell(rf"{forked} generate abc --model $'./\xff\xfe'"), "where there is no folder")


def test_the_prompt_from_standard_input(model_folder: Path, forked: str) -> None:
    for locale, start in (("C.UTF-8", forked), ("C", MOESTRO)):  # Python reads its locale when it starts
        line = f"printf 'd\\xc3\\xa9f f' | {start} generate - --model {model_folder} --max-new-tokens 1 --json"
        done = shell(line, LC_ALL=locale, PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
        assert done.returncode == 0, done
        assert b'"prompt": "d\\u00e9f f"' in done.stdout
    refused(shell(f"{forked} generate - </dev/null"), "an empty prompt")
    refused(shell(f"{forked} generate - <&-"), "an empty prompt")


INTERRUPTED_AT_AN_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
sys.meta_path.insert(0, Interrupt())
from moestro_command import main
main()
"""


@pytest.mark.parametrize(
    "module", ["moestro", "moestro.cli", "typer", "torch", "torch.nn.functional", "moestro.experts"]
)
def test_an_interrupt_while_it_starts(module: str) -> None:
    """The package's import alone takes about a second: until it is done Ctrl-C meets another line of it each time."""
    command = [sys.executable, "-c", INTERRUPTED_AT_AN_IMPORT, "info"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "INTERRUPT_AT": module}, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_progress_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 2.0, 9.0])
    with progress.points(4, clock=lambda: next(times)) as on_point:
        for name in ("a", "b", "c"):
            on_point(name)
    assert capsys.readouterr().err.splitlines() == [
        "measuring the roof",
        "point 1 of 4: a",
        "point 3 of 4: c, about 9 s left",
    ]
