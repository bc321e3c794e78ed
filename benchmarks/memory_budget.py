"""A model in less memory than it needs: `--memory` beside mapped files and llama-server, while other memory is taken.

python benchmarks/memory_budget.py FOLDER
python benchmarks/memory_budget.py FOLDER --llama-server PATH --gguf FILE.gguf

FOLDER is a checkpoint (examples/make_checkpoint.py makes them). First everything is in memory: mapped files, and a
budget of all experts. Then a process locks so much memory that what is left is the model beside its experts, the budget
and a little, so that the page cache cannot help (Linux; needs the right to lock memory): a budget of half of the
experts, and the least one. Each case runs in a process of its own. The bound of a case is the larger of what its tokens
read over the disk's rate, measured right before and after the case, and of a token's time with everything in memory.
Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

import serving
from moestro import machine
from moestro.bench.measure import versions
from moestro.bench.report import machine_line
from moestro.memory.prefetch import BLOCK, BLOCKS
from moestro.memory.reader import Reader, Run

RESULTS = Path(__file__).parent / "results"
PROMPT = "once upon a time"
OTHER = "in the beginning was"
LONG = PROMPT * 40
"""Long enough that it asks for nearly every expert, so that what follows finds them in memory."""
SLACK = 1_200_000_000
"""Bytes that a process takes beside weights and slots: PyTorch, Transformers, workspace."""
PATIENCE = 900


@dataclass
class Case:
    """What one run gave.

    Attributes:
        rate: tokens a second, prompts not counted.
        hit_rate: of generation; None without a budget.
        read: bytes that a token of generation read from files, those of the prompt left out.
        gain: with prefetching, the time of a step without it over that with it, as the run itself compared them.
        recall: with prefetching, the share of experts that were predicted.
        free: bytes that were available before the run.
        disk: bytes a second that the disk read right before it and right after it; None with everything in memory.
    """

    name: str
    rate: float | None = None
    hit_rate: float | None = None
    read: float | None = None
    gain: float | None = None
    recall: float | None = None
    free: int | None = None
    disk: float | None = None
    text: str | None = None
    reason: str | None = None


def available() -> int:
    """Bytes that the system could still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


HOLD = """
import ctypes, mmap, sys
size = int(sys.argv[1])
open("/proc/self/oom_score_adj", "w").write("-1000")
block = mmap.mmap(-1, size)
libc = ctypes.CDLL(None, use_errno=True)
address = ctypes.addressof(ctypes.c_char.from_buffer(block))
if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
    sys.exit(f"mlock: error {ctypes.get_errno()}")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def taken(size: int) -> Iterator[None]:
    """So many bytes of memory are locked by another process inside."""
    if size <= 0:
        yield
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(size)], **pipes)
    try:
        if holder.stdout.readline().strip() != "held":
            raise RuntimeError(f"memory could not be locked: {holder.stderr.read().strip()}")
        yield
        if holder.poll() is not None:
            raise RuntimeError("the system took the locked memory back: nothing of this case counts")
    finally:
        holder.kill()
        holder.wait()


def disk_rates(folder: Path, expert_bytes: int) -> list[float]:
    """Bytes a second, round by round, of pieces as large as an expert from random places, past the page cache."""
    paths = sorted(folder.glob("*.safetensors"))
    reader, chance = Reader(), random.Random(0)
    files = {}
    for path in paths:
        found = path.stat()
        files[reader.add(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))] = found.st_size
    size, count = expert_bytes // 4096 * 4096, 48
    block = mmap.mmap(-1, size * count)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    rates = []
    for _ in range(6):
        places = [chance.choice(list(files.items())) for _ in range(count)]
        start = time.perf_counter()
        tickets = [
            reader.submit(
                [Run(file, chance.randrange((length - size) // 4096) * 4096, size, address + n * size)], "a piece"
            )
            for n, (file, length) in enumerate(places)
        ]
        for ticket in tickets:
            ticket.wait()
        rates.append(size * count / (time.perf_counter() - start))
    return rates[1:]  # the first also has the system find pages for the block


def by_moestro(name: str, folder: Path, tokens: int, *options: str, prompt: str = PROMPT) -> Case:
    """`moestro generate`; with a budget once more for a single token, whose lookups are the prompt's.

    With prefetching what counts is a second prompt, after the comparison has ended.
    """
    found = Case(name, free=available())
    prompts = [OTHER, prompt] if "--prefetch" in options else [prompt]
    try:
        *before, said = generated(folder, tokens, *options, prompts=prompts)
        found.rate, found.text = said["tokens_per_second"]["generated"], said["text"]
        if (memory := said["memory"]) is not None:
            rest = [generated(folder, 1, *options, prompts=[prompt])[-1], *before]
            left = [each["memory"]["decode"] for each in rest]
            keys = "lookups", "hits", "read_bytes"
            lookups, hits, read = (memory["decode"][key] - sum(each[key] for each in left) for key in keys)
            found.hit_rate, found.read = hits / lookups, read / (tokens - 1)
            if (ahead := memory["prefetch"]) is not None:
                found.gain, found.recall = ahead["gain"], ahead["recall"]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found.reason = str(error)
    return found


def generated(folder: Path, tokens: int, *options: str, prompts: Sequence[str] = (PROMPT,)) -> list[dict[str, Any]]:
    """What `moestro generate --json` says of each prompt."""
    fixed = ["--model", str(folder), "--no-do-sample", "--max-new-tokens", str(tokens), "--json"]
    command = [sys.executable, "-m", "moestro", "generate", *prompts, *fixed, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_llama(name: str, arguments: argparse.Namespace, tokens: int) -> Case:
    """llama-server on the mapped file, after the same tokens; such a file has no tokenizer."""
    found = Case(name, free=available())
    prompt = AutoTokenizer.from_pretrained(arguments.folder)(PROMPT)["input_ids"]
    threads = str(torch.get_num_threads())
    fixed = [
        arguments.llama_server,
        "-m",
        str(arguments.gguf),
        "-np",
        "1",
        "-c",
        "1024",
        "-t",
        threads,
        "--no-warmup",
        "--no-repack",
    ]
    server = serving.Server("llama-server", lambda port: [*fixed, "--port", str(port)])
    try:
        stream = serving.take_turn(server, lambda port, pid: serving.ask(port, prompt, tokens))
        found.rate, found.text = (stream.tokens - 1) / stream.rest, stream.text
    except (RuntimeError, OSError, TimeoutError) as error:
        found.reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return found


def plan(folder: Path) -> dict[str, Any]:
    """What the model's experts take, by a run of a token that has memory for all."""
    whole = str(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    return dict(generated(folder, 1, "--memory", whole)[-1]["memory"])


def run(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All cases; `save` is given what there is after each."""
    folder, tokens = arguments.folder, arguments.tokens
    sizes = plan(folder)
    print(json.dumps({name: sizes[name] for name in ("expert_bytes", "cycle_bytes", "least_bytes")}), flush=True)
    rest = sum(path.stat().st_size for path in folder.glob("*.safetensors")) - sizes["expert_bytes"]
    an_expert = sizes["cycle_bytes"] // max(1, len(sizes["layers"])) // arguments.top_k
    rates: list[float] = disk_rates(folder, an_expert)
    cases: list[Case] = []

    def keep(case: Case) -> Case:
        print(asdict(case), flush=True)
        cases.append(case)
        save(report())
        return case

    def read_between(case: Callable[[], Case]) -> Case:
        before = disk_rates(folder, an_expert)
        found = case()
        measured = before + disk_rates(folder, an_expert)
        rates.extend(measured)
        found.disk = median(measured)
        return keep(found)

    def report() -> dict[str, Any]:
        known = {name: value for name, value in sizes.items() if name != "layers"}
        return {"sizes": known, "disk": max(rates), "disk_rates": rates, "rows": cases}

    whole = str(sizes["expert_bytes"])
    for _ in range(arguments.rounds):
        keep(by_moestro("all in memory: mapped files", folder, 4 * tokens, prompt=LONG))
        keep(by_moestro("all in memory: a budget of all", folder, 4 * tokens, "--memory", whole, prompt=LONG))
    for name, budget in (("half", sizes["expert_bytes"] // 2), ("least", sizes["least_bytes"])):
        ballast = available() - rest - budget - SLACK
        for _ in range(arguments.rounds):
            with taken(ballast):
                options = ("--memory", str(budget))
                read_between(partial(by_moestro, f"{name}: a budget", folder, 2 * tokens, *options))
            if name == "half":
                with taken(ballast):
                    ahead = "half: a budget, reading ahead"
                    read_between(partial(by_moestro, ahead, folder, 1 + BLOCK * BLOCKS, *options, "--prefetch"))
            with taken(ballast):
                keep(by_moestro(f"{name}: mapped files", folder, tokens))
            if arguments.llama_server:
                with taken(ballast):
                    keep(by_llama(f"{name}: llama-server", arguments, tokens))
    return report()


def table(found: dict[str, Any]) -> str:
    """A row a case, medians."""
    by_name: dict[str, list[Case]] = {}
    for case in found["rows"]:
        by_name.setdefault(case.name, []).append(case)
    held = [case.rate for name, runs in by_name.items() if name.startswith("all") for case in runs if case.rate]
    base = max(held, default=float("nan"))
    every, token = (found["sizes"][name] / 1e9 for name in ("expert_bytes", "cycle_bytes"))
    lines = [
        f"The disk reads {found['disk'] / 1e9:.2f} GB/s at best, {median(found['disk_rates']) / 1e9:.2f} as a rule."
        f" Experts: {every:.1f} GB, those of a token {token:.2f} GB.",
        "",
        "| | tokens/s | hits | read a token, GB | of the bound | same text | reading ahead |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for name, runs in by_name.items():
        rates = [case.rate for case in runs if case.rate]
        if not rates:
            lines.append(f"| {name} | {runs[0].reason} | | | | | |")
            continue
        rate, hits, read, bound, same = median(rates), "", "", "", ""
        if runs[0].hit_rate is not None:
            mean = median(case.read for case in runs)
            hits, read = f"{median(case.hit_rate for case in runs):.1%}", f"{mean / 1e9:.2f}"
            disk = median([case.disk for case in runs if case.disk] or [found["disk"]])
            bound = f"{rate * max(mean / disk, 1 / base):.0%}"
        if runs[0].text is not None:
            kind = name.startswith("all in memory")  # which has another prompt
            other = next(case.text for case in found["rows"] if case.text and case.name.startswith("all") == kind)
            same = "yes" if all(c.text[: len(other)] == other[: len(c.text)] for c in runs if c.text) else "no"
        ahead = ""
        if runs[0].gain is not None:
            gain, recall = (median(getattr(case, key) for case in runs) for key in ("gain", "recall"))
            ahead = f"{gain:.2f}x a step, recall {recall:.0%}"
        lines.append(f"| {name} | {rate:.2f} | {hits} | {read} | {bound} | {same} | {ahead} |")
    return "\n".join(lines)


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-server", help="The program.")
    parser.add_argument("--gguf", type=Path, help="What it serves.")
    parser.add_argument("--tokens", type=int, default=8, help="New tokens of the slowest cases.")
    parser.add_argument("--top-k", type=int, default=4, help="Experts of a token in a layer.")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    Path("/proc/self/oom_score_adj").write_text("500")  # of all, what is measured is to go first
    about = {**machine.describe(), "device": "cpu"}
    date = datetime.datetime.now(datetime.UTC)
    command = " ".join(["python benchmarks/memory_budget.py", *sys.argv[1:]])
    target = RESULTS / f"{date:%Y-%m-%d}-memory-{arguments.folder.name}"
    beside = {"machine": about, "command": command, "date": date.isoformat(timespec="seconds"), "versions": versions()}

    def page(found: dict[str, Any]) -> str:
        return f"{machine_line(about)}\n`{command}`, medians.\n\n{table(found)}\n"

    def save(found: dict[str, Any]) -> None:
        report = {**beside, **found, "rows": [asdict(case) for case in found["rows"]]}
        target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        title = f"# Experts of {arguments.folder.name} within a memory budget"
        target.with_suffix(".md").write_text(f"{title}\n\n{page(found)}")

    print(page(run(arguments, save)))


if __name__ == "__main__":
    main()
