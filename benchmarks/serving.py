"""Endpoints under load: one stream, several at once, and a long prompt that comes twice.

python benchmarks/serving.py FOLDER                                        moestro serve, alone and with --batch 8
python benchmarks/serving.py FOLDER --llama-server PATH --gguf FILE.gguf   and llama-server on the same bits

FOLDER is a checkpoint (examples/make_checkpoint.py makes them), FILE.gguf what benchmarks/gguf_model.py makes of it.
Servers take turns, each in a process of its own that has the machine to itself, and are asked over loopback for
/v1/completions, streamed and greedy. llama-server gets the prompts as tokens, since such a file has no tokenizer.
`moestro generate` continues the first prompt beside them. A ratio is printed only where all texts are those of the
first server: whole models of random weights give none, since rounding changes their tokens. Results go to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from moestro import machine
from moestro.bench.measure import versions
from moestro.bench.report import machine_line

RESULTS = Path(__file__).parent / "results"
STREAMS = 8
SHORT, LONG = 64, 2000
"""Tokens of a prompt."""
NEW_TOKENS = {"one": 64, "several": 32, "long": 4}
PATIENCE = 600
"""Seconds that a server has to start, and a request to be answered."""


Found = TypeVar("Found")


@dataclass(frozen=True)
class Server:
    """A server's name, and what starts it on a port."""

    name: str
    command: Callable[[int], list[str]]
    takes_tokens: bool = False


@dataclass
class Stream:
    """What one request got: seconds to the first piece of text, from there to the last, and tokens."""

    first: float
    rest: float
    tokens: int
    text: str


@dataclass
class Turn:
    """One server's figures of one round.

    Attributes:
        one: tokens a second of one stream, after its first.
        several: tokens a second of all streams together, from the first request to the last answer.
        several_first: the median of their seconds to the first token.
        cold, warm: seconds to the first token of a long prompt, and of one that begins like it.
        resident: bytes of the process afterwards.
        texts: of the one stream, and of the several.
    """

    one: float
    several: float | None = None
    several_first: float | None = None
    cold: float | None = None
    warm: float | None = None
    resident: int | None = None
    texts: list[str] = field(default_factory=list)


@dataclass
class Row:
    """A server and its turns."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    reason: str | None = None


def prompts(folder: Path, count: int, length: int, seed: int) -> list[tuple[str, list[int]]]:
    """Texts of so many tokens, and these tokens."""
    tokenizer, words = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    found = []
    for _ in range(count):
        text = " ".join("".join(words.choices("abcdefghij", k=words.randint(2, 7))) for _ in range(length))
        ids = tokenizer(text)["input_ids"][:length]
        text = tokenizer.decode(ids)
        found.append((text, tokenizer(text)["input_ids"]))
    return found


def ask(port: int, prompt: str | list[int], new_tokens: int) -> Stream:
    """One streamed completion."""
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    start, times, tokens, text = time.perf_counter(), [], 0, ""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read(300)!r}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
        if piece:
            times.append(time.perf_counter())
            text += piece
    connection.close()
    if not times:
        raise RuntimeError("an answer without text")
    return Stream(times[0] - start, times[-1] - times[0], tokens, text)


def measure(port: int, pid: int, texts: dict[str, list[Any]]) -> Turn:
    """Ask a server that is up."""
    ask(port, texts["warm-up"][0], 4)
    one = ask(port, texts["one"][0], NEW_TOKENS["one"])
    streams: dict[int, Stream] = {}

    def keep(index: int, prompt: Any) -> None:
        streams[index] = ask(port, prompt, NEW_TOKENS["several"])

    threads = [threading.Thread(target=keep, args=pair) for pair in enumerate(texts["several"])]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if len(streams) != STREAMS:
        raise RuntimeError(f"{STREAMS - len(streams)} of {STREAMS} streams failed")
    cold = ask(port, texts["long"][0], NEW_TOKENS["long"])
    warm = ask(port, texts["long"][1], NEW_TOKENS["long"])
    return Turn(
        one=(one.tokens - 1) / one.rest,
        several=sum(stream.tokens for stream in streams.values()) / seconds,
        several_first=median(stream.first for stream in streams.values()),
        cold=cold.first,
        warm=warm.first,
        resident=resident(pid),
        texts=[one.text, *(streams[index].text for index in sorted(streams))],
    )


def resident(pid: int) -> int:
    """Bytes of a process in memory, mapped files included (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def take_turn(server: Server, measured: Callable[[int, int], Found]) -> Found:
    """Start a server, measure it by its port and process, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(server.command(port), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not is_up(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{server.name} did not start: {''.join(said[-3:])}")
            time.sleep(0.2)
        return measured(port, process.pid)
    finally:
        process.terminate()
        process.wait()


def is_up(port: int) -> bool:
    """Whether /health answers with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def by_generate(folder: Path, prompt: str) -> Turn:
    """`moestro generate` on the prompt of the one stream."""
    options = ["--model", str(folder), "--no-do-sample", "--max-new-tokens", str(NEW_TOKENS["one"]), "--json"]
    command = [sys.executable, "-m", "moestro", "generate", "-", *options]
    found = json.loads(subprocess.run(command, input=prompt, capture_output=True, text=True, check=True).stdout)
    return Turn(one=found["tokens_per_second"]["generated"], texts=[found["text"]])


COLUMNS = {
    "one": "one stream, tokens/s",
    "several": f"{STREAMS} streams, tokens/s together",
    "several_first": "their first token, s",
    "cold": f"{LONG} tokens: first token, s",
    "warm": "again, s",
    "resident": "resident, bytes",
}


def table(rows: list[Row]) -> str:
    """The medians in Markdown, with ratios to the first server where all texts are its own."""
    lines = [f"| | {' | '.join(COLUMNS.values())} | same texts |", f"|---|{'---:|' * (len(COLUMNS) + 1)}"]
    base = rows[0].turns
    for row in rows:
        if not row.turns or not base:
            lines.append(f"| {row.name} | {row.reason or 'not compared'} |{' |' * len(COLUMNS)}")
            continue
        ours, first = row.turns[0].texts, base[0].texts
        same = sum(one == other for one, other in zip(ours, first, strict=False))
        cells = [cell(row.turns, base, name, same == len(ours)) for name in COLUMNS]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {same} of {len(ours)} |")
    return "\n".join(lines)


def cell(turns: list[Turn], base: list[Turn], name: str, compared: bool) -> str:
    """A median, and its ratio to the first server's."""
    values = [value for turn in turns if (value := getattr(turn, name)) is not None]
    if not values:
        return ""
    found, first = median(values), median(getattr(turn, name) for turn in base)
    text = f"{found:.3g}" if name != "resident" else f"{found / 1e9:.1f}e9"
    return f"{text} ({found / first:.2f}x)" if compared and turns is not base and name != "resident" else text


def servers(arguments: argparse.Namespace) -> list[Server]:
    """Those that were asked for."""

    def moestro(batch: int, *options: str) -> Callable[[int], list[str]]:
        fixed = [sys.executable, "-m", "moestro", "serve", str(arguments.folder), "--batch", str(batch), *options]
        return lambda port: [*fixed, "--port", str(port)]

    extra = arguments.options.split()
    found = [Server("moestro", moestro(1, *extra)), Server(f"moestro --batch {STREAMS}", moestro(STREAMS, *extra))]
    if arguments.llama_server:
        context = STREAMS * (LONG + 256)
        fixed = [arguments.llama_server, "-m", str(arguments.gguf), "-np", str(STREAMS), "-c", str(context)]
        threads = ["-t", str(torch.get_num_threads()), "-tb", str(torch.get_num_threads())]
        found.append(Server("llama-server", lambda port: [*fixed, *threads, "--port", str(port)], takes_tokens=True))
    return found


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-server", help="The program.")
    parser.add_argument("--gguf", type=Path, help="What it serves.")
    parser.add_argument("--options", default="", help="More options of moestro serve, in one string.")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    kinds = {"warm-up": (1, SHORT), "one": (1, SHORT), "several": (STREAMS, SHORT), "long": (1, LONG)}
    chosen = {name: prompts(arguments.folder, *sizes, seed) for seed, (name, sizes) in enumerate(kinds.items())}
    text, ids = chosen["long"][0]
    chosen["long"].append((text + "abc", [*ids, *ids[:3]]))
    rows = [Row(server.name) for server in servers(arguments)]
    plain = Row("moestro generate")
    for number in range(arguments.rounds):
        plain.turns.append(by_generate(arguments.folder, chosen["one"][0][0]))
        for row, server in zip(rows, servers(arguments), strict=True):
            print(f"round {number + 1} of {arguments.rounds}: {row.name}", file=sys.stderr, flush=True)
            mine = {name: [pair[server.takes_tokens] for pair in pairs] for name, pairs in chosen.items()}
            try:
                row.turns.append(take_turn(server, partial(measure, texts=mine)))
            except (RuntimeError, OSError) as error:
                row.reason = str(error).strip().splitlines()[-1]
                print(row.reason, file=sys.stderr)
    about = {**machine.describe(), "device": "cpu"}
    date = datetime.datetime.now(datetime.UTC)
    rows.insert(1, plain)
    report = {
        "command": " ".join(["python benchmarks/serving.py", *sys.argv[1:]]),
        "date": date.isoformat(timespec="seconds"),
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
    }
    target = RESULTS / f"{date:%Y-%m-%d}-serving-{arguments.folder.name}"
    target.with_suffix(".json").write_text(json.dumps({"machine": about, **report}, indent=1) + "\n")
    said = f"`{report['command']}`, {arguments.rounds} rounds in turns, medians."
    page = f"{machine_line(about)}\n{said}\n\n{table(rows)}\n"
    target.with_suffix(".md").write_text(f"# Serving {arguments.folder.name}\n\n{page}")
    print(page)


if __name__ == "__main__":
    main()
