"""Whole models, token by token: moestro, llama.cpp and Transformers on the same weights, against the memory.

python benchmarks/end_to_end.py FOLDER                                     all of them
python benchmarks/end_to_end.py FOLDER --engines moestro,llama.cpp-q4_0    the first is what others are compared with
python benchmarks/end_to_end.py FOLDER --plain BF16_FOLDER                 what Transformers reads instead of FOLDER
python benchmarks/end_to_end.py FOLDER --sequences 8 --prompt 512          eight prompts at once, of 512 tokens each

FOLDER is a checkpoint; `examples/make_checkpoint.py --branches 0.05 --routers 4` makes one on which correct engines
agree. llama.cpp is `python benchmarks/install_peers.py PEERS llama` in the folder that MOESTRO_BENCH_PEERS names; its
GGUF files are written from FOLDER, into --work, and removed. Engines take turns, each in a process of its own that has
the machine to itself. Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from engines import LLAMA_CPP, MOESTRO, REFERENCE, TRANSFORMERS, Job, Turn
from gguf_model import EXPERT_TYPES, REST_TYPES, Storage, read_bytes, write_gguf
from moestro import machine
from moestro.bench.measure import versions
from moestro.bench.report import machine_line
from moestro.bench.timing import ratio
from moestro.errors import MoestroError, invalid_input, unsupported
from moestro.formats import FORMATS
from moestro.hf.sources import read_sources
from peers import installed
from peers.bounds import OTHER_WEIGHTS, whole_model

RESULTS = Path(__file__).parent / "results"
ENGINES = (
    "moestro",
    "moestro-projections",
    "moestro-projections-int8",
    "llama.cpp-mxfp4",
    "llama.cpp-q4_0",
    "transformers-grouped_mm",
)
OPERATION = "end_to_end"
_OTHERS = re.compile(r"embed_tokens|\.experts\.|\.(gate|router)\.")
"""In names of matrices that are those of no linear module beside the experts."""


@dataclass
class Row:
    """One engine: what its weights are, and what was measured; None where it did not run.

    Attributes:
        experts, rest: how it holds the weights of the experts, and the matrices beside them.
        bytes_per_token: of all weights that one token reads; the cache of keys and values is left out.
        tokens_per_second: of all sequences; median over runs of the steps after the first; low and high are quartiles.
        of_floor: time of a step over the least time for its bytes at the measured bandwidth; of one sequence.
        ratio: time of a step over that of the first engine, the median over rounds; `prompt_ratio`: of a prompt.
        logits_error: relative L2 distance of the logits after the prompts from those of the reference.
        same_tokens: how many steps had the first engine's tokens before one had another.
    """

    engine: str
    experts: str
    rest: str
    bytes_per_token: float | None = None
    status: str = "ok"
    reason: str | None = None
    tokens_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    of_floor: float | None = None
    ratio: float | None = None
    prompt_ratio: float | None = None
    prompt_tokens_per_second: float | None = None
    logits_error: float | None = None
    same_tokens: int | None = None
    load_seconds: float | None = None
    resident_bytes: int | None = None
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and what one token reads of it.

    Attributes:
        folder: where it is.
        format: of its experts.
        kind: "model_type" of its configuration.
        num_layers: how many layers it has.
        method: of its quantisation config, or None.
        read_bytes: of all weights one token reads, as stored.
        plain_read_bytes, plain_bytes: the same, and all weights, with everything in bfloat16.
        projection_bytes: those that linear modules beside experts and routers read for it.
    """

    folder: Path
    format: str
    kind: str
    num_layers: int
    method: str | None
    read_bytes: float
    plain_read_bytes: float
    plain_bytes: int
    projection_bytes: float = 0.0


@dataclass(frozen=True)
class Right:
    """Logits of the reference [sequences, vocabulary], the format of its experts, and how many layers it has."""

    logits: np.ndarray[Any, Any]
    experts: str
    num_layers: int


def describe(folder: Path) -> Model:
    """Read a checkpoint's headers."""
    config, checkpoint, sources = read_sources(folder)
    text = config.get_text_config()
    packed = {name for source in sources for name in source.names}
    rest = {name: checkpoint.entry(name) for name in checkpoint.names if name not in packed}
    share = text.num_experts_per_tok / sources[0].stored.shape[0]
    stored = plain = whole = 0.0
    for source in sources:
        stored += share * sum(checkpoint.entry(name).nbytes for name in source.names)
        elements = int(np.prod(source.stored.shape))
        plain, whole = plain + 2 * share * elements, whole + 2 * elements
    for name, entry in rest.items():
        rows = entry.shape[0] if name.endswith("embed_tokens.weight") and not config.tie_word_embeddings else 1
        part = share if ".experts." in name else 1 / rows
        stored, plain, whole = stored + part * entry.nbytes, plain + part * entry.nbytes, whole + entry.nbytes
    raw = json.loads((folder / "config.json").read_text())
    method = (raw.get("quantization_config") or {}).get("quant_method")
    layers = text.num_hidden_layers
    formats = dict.fromkeys(source.stored.format.name for source in sources)
    linear = [e for name, e in rest.items() if len(e.shape) == 2 and not _OTHERS.search(name)]
    projections = float(sum(entry.nbytes for entry in linear))
    return Model(
        folder, " and ".join(formats), raw["model_type"], layers, method, stored, plain, int(whole), projections
    )


def storage_of(engine: str) -> Storage:
    """What "llama.cpp-EXPERTS" or "llama.cpp-EXPERTS-REST" stores."""
    experts, _, rest = engine.removeprefix(f"{LLAMA_CPP}-").partition("-")
    if engine.startswith(f"{LLAMA_CPP}-") and experts in EXPERT_TYPES and (rest or "bf16") in REST_TYPES:
        return Storage(experts, rest or "bf16")
    known = [*MOESTRO, f"{LLAMA_CPP}-{{{','.join(EXPERT_TYPES)}}}", *(f"transformers-{name}" for name in TRANSFORMERS)]
    raise invalid_input(OPERATION, got=f"engine {engine!r}", needs=f"one of {', '.join(known)}", fix="Pick one.")


def plan(names: list[str], model: Model, plain: Model | None) -> list[Row]:
    """A row for each engine; those that cannot run this model say why."""
    rows = []
    for name in names:
        if name in MOESTRO:
            rest, read = MOESTRO[name].get("projections"), model.read_bytes
            if rest in FORMATS:
                read -= model.projection_bytes * (1 - FORMATS[rest].bits / 16)
            rows.append(Row(name, model.format, rest if rest in FORMATS else "bfloat16", read))
        elif name.removeprefix("transformers-") in TRANSFORMERS:
            rows.append(Row(name, "bfloat16", "bfloat16", (plain or model).plain_read_bytes))
            _skip(rows[-1], _why_not(plain or model))
        else:
            storage = storage_of(name)
            rows.append(Row(name, storage.experts, storage.rest))
            _skip(rows[-1], installed.missing("llama.cpp", "llama/llama_cpp"))
    return rows


def _skip(row: Row, reason: str | None) -> None:
    if reason is not None:
        row.status, row.reason = "not run", reason


def _why_not(model: Model) -> str | None:
    """Why Transformers cannot run a checkpoint here, or None."""
    if model.method == "moestro":
        return "Transformers alone does not read moestro's own formats: name the bfloat16 checkpoint with --plain"
    free = machine.available_bytes()
    if model.plain_bytes > free:
        return f"it holds the model in bfloat16, {model.plain_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return None


def measure(rows: list[Row], jobs: dict[str, Job], rounds: int) -> float:
    """Let the engines take turns; returns the bandwidth of memory, in bytes per second.

    It is the median of plain reads of a model's own weights, after each run; where no engine's can be read, the best
    of the probes between rounds.
    """
    best = 0.0
    for number in range(rounds):
        best = max(best, machine.measure(torch.bfloat16).bytes_per_second)
        active = [row for row in rows if row.status == "ok"]
        for row in active if number % 2 == 0 else active[::-1]:
            print(f"round {number + 1} of {rounds}: {row.engine}", file=sys.stderr, flush=True)
            turn, problem = take_turn(jobs[row.engine])
            if turn is None:
                row.status, row.reason = "failed", problem
            else:
                row.turns.append(turn)
    reads = [rate for row in rows for turn in row.turns for rate in turn.read_rates]
    return median(reads) if reads else max(best, machine.measure(torch.bfloat16).bytes_per_second)


def reference(job: Job) -> np.ndarray[Any, Any]:
    """The logits that all engines' are held to. Raises UnsupportedError where they cannot be had."""
    print(f"logits of {REFERENCE}", file=sys.stderr, flush=True)
    turn, problem = take_turn(job)
    if turn is None:
        raise unsupported(
            OPERATION,
            got=f"{REFERENCE}, which failed: {problem}",
            needs="its logits, which those of all engines are compared with",
            fix="Free memory: beside the experts it holds the model in float32.",
        )
    found: np.ndarray[Any, Any] = np.load(str(job.logits))
    return found


def take_turn(job: Job) -> tuple[Turn | None, str | None]:
    """Run a job in a process of its own: what it found, or the last line of what it said instead."""
    command = [sys.executable, str(Path(__file__).parent / "engines.py"), json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [] if done.returncode < 0 else done.stderr.strip().splitlines()  # below 0: killed by a signal
        return None, said[-1] if said else f"exit code {done.returncode}"
    return Turn(**json.loads(done.stdout.splitlines()[-1])), None


def conclude(rows: list[Row], jobs: dict[str, Job], bandwidth: float, right: Right) -> None:
    """Fill in what follows from the turns."""
    first = rows[0]
    for row in rows:
        if row.status != "ok":
            continue
        job = jobs[row.engine]
        speeds = [len(job.ids) * len(steps) / sum(steps) for turn in row.turns for steps in turn.step_seconds]
        row.tokens_per_second = median(speeds)
        row.low, _, row.high = quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
        if row.bytes_per_token is not None and len(job.ids) == 1:
            row.of_floor = bandwidth / row.bytes_per_token / row.tokens_per_second
        prompts = [seconds for turn in row.turns for seconds in turn.prompt_seconds]
        row.prompt_tokens_per_second = len(job.ids) * len(job.ids[0]) / median(prompts)
        row.load_seconds = median(turn.load_seconds for turn in row.turns)
        row.resident_bytes = max(turn.resident_bytes for turn in row.turns)
        _check(row, np.load(str(job.logits)), right)
        if row is not first and first.status == row.status == "ok":
            _compare(row, first)


def _check(row: Row, logits: np.ndarray[Any, Any], right: Right) -> None:
    """Hold an engine's logits to the right ones."""
    found, expected = logits.astype(np.float64), right.logits.astype(np.float64)
    row.logits_error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    stream = "float32" if row.engine.startswith(LLAMA_CPP) or row.engine == REFERENCE else "bfloat16"
    same = (row.experts, row.rest.replace("bf16", "bfloat16")) == (right.experts, "bfloat16")
    bound = whole_model(right.num_layers, stream) if same else OTHER_WEIGHTS
    if not row.logits_error <= bound:
        row.status = "wrong output"
        row.reason = f"its logits are {row.logits_error:.2g} off {REFERENCE}'s, over {bound:.2g}"


def _compare(row: Row, first: Row) -> None:
    """Times over the first engine's, round by round, and how long both had the same tokens."""
    steps = [[sum(map(sum, turn.step_seconds)) for turn in each.turns] for each in (row, first)]
    row.ratio = _ratio(*steps)
    row.prompt_ratio = _ratio(*([sum(turn.prompt_seconds) for turn in each.turns] for each in (row, first)))
    pairs = list(zip(row.turns[-1].ids, first.turns[-1].ids, strict=True))
    row.same_tokens = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _ratio(times: list[float], baseline: list[float]) -> float:
    return ratio(times, baseline).median if len(times) > 1 else times[0] / baseline[0]


def table(rows: list[Row]) -> str:
    """Markdown: a line for each engine."""
    columns = (
        "GB a token",
        "floor, tokens/s",
        "tokens/s",
        "time / floor",
        f"time / {rows[0].engine}'s",
        "prompt, tokens/s",
        "prompt time, same ratio",
        "logits off",
        "same tokens",
        "load, s",
        "most resident, GB",
    )
    lines = [f"| engine | experts | rest | {' | '.join(columns)} |", "|---|---|---|" + "---:|" * len(columns)]
    for row in rows:
        numbers = [_gigabytes(row.bytes_per_token, 2), "-"] + ["-"] * (len(columns) - 2)
        if row.tokens_per_second is not None:
            floor = None if row.of_floor is None else row.of_floor * row.tokens_per_second
            speed = f"{row.tokens_per_second:.2f} ({row.low:.2f}-{row.high:.2f})"
            numbers = [
                _gigabytes(row.bytes_per_token, 2),
                _number(floor, ".1f"),
                speed,
                _number(row.of_floor, ".2f"),
                _number(row.ratio, ".2f", "x"),
                _number(row.prompt_tokens_per_second, ".1f"),
                _number(row.prompt_ratio, ".2f", "x"),
                _number(row.logits_error, ".1e"),
                _number(row.same_tokens, "d"),
                _number(row.load_seconds, ".1f"),
                _gigabytes(row.resident_bytes, 1),
            ]
        lines.append(f"| {row.engine} | {row.experts} | {row.rest} | {' | '.join(numbers)} |")
    notes = [f"- {row.engine}: {row.status}: {row.reason}" for row in rows if row.reason]
    return "\n".join([*lines, "", *notes] if notes else lines)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _gigabytes(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value / 1e9:.{digits}f}"


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """The whole result in Markdown."""
    model, job = about["model"], about["job"]
    rounds = f"{job['repeats']} runs in each of {job['rounds']} rounds after one that is not counted"
    tokens = f"{job['sequences']} x {job['prompt_tokens']} tokens of prompt, {job['new_tokens']} new ones each"
    return "\n".join(
        [
            f"# End to end, {model['kind']}, {about['date']}",
            "",
            f"- machine: {machine_line(about['machine'])}",
            f"- bandwidth, by plain reads of a model's own weights after its runs: {about['bandwidth'] / 1e9:.1f} GB/s",
            f"- versions: {', '.join(f'{k} {v}' for k, v in about['versions'].items())}",
            f"- {tokens}; {rounds}; {job['threads']} threads",
            f"- command: `{about['command']}`",
            "",
            *_LEGEND,
            "",
            table(rows),
            "",
        ]
    )


_LEGEND = (
    "Engines take turns, each in a process of its own, in reversed order on odd rounds. Tokens/s are those of all",
    "sequences after their first ones: the median of the runs, and in brackets its quartiles. GB a token are the",
    "weights that one token reads as the engine holds them: the experts it is routed to, and everything else but the",
    "embedding's other rows. The floor is what the bandwidth allows for them, for one sequence. Logits are those after",
    "the prompts, in relative L2 norm against the same stored weights with all else in float32 (moestro): llama.cpp",
    "keeps what passes through the layers in float32, Transformers' models keep it in bfloat16. Tokens are counted",
    "until the first that is not the first engine's: on random weights the likeliest lie close together, and roundings",
    "decide between them.",
)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if an output was wrong or an engine failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--plain", type=Path, help="what Transformers reads, if it cannot read FOLDER")
    parser.add_argument("--prompt", type=int, default=17, help="tokens")
    parser.add_argument("--sequences", type=int, default=1, help="prompts that are continued at once")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2, help="timed runs in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--work", type=Path, help="a folder for GGUF files; those that are there are taken as they are")
    parser.add_argument("--name", help="of the result; default: the model's type")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except (MoestroError, ImportError) as error:
        print(f"benchmarks/end_to_end.py: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Prepare, measure, write."""
    torch.set_num_threads(options.threads)
    model = describe(options.folder)
    rows = plan(options.engines.split(","), model, options.plain and describe(options.plain))
    vocabulary = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    ids = [random.Random(n).choices(range(vocabulary), k=options.prompt) for n in range(options.sequences)]
    with tempfile.TemporaryDirectory() as scratch:
        jobs = {}
        for row in rows:
            where = _place_of(row, options, Path(scratch)) if row.status == "ok" else options.folder
            logits = str(Path(scratch) / f"{row.engine}.npy")
            jobs[row.engine] = Job(
                row.engine, str(where), ids, options.new_tokens, options.repeats, options.threads, logits
            )
        first = Job(REFERENCE, str(options.folder), ids, 0, 0, options.threads, str(Path(scratch) / "right.npy"))
        right = Right(reference(first), model.format, model.num_layers)
        bandwidth = measure(rows, jobs, options.rounds)
        conclude(rows, jobs, bandwidth, right)
    about = {
        "date": str(datetime.date.today()),
        "command": command(options, sys.argv[1:]),
        "machine": {**machine.describe(), "device": "cpu"},
        "versions": {**versions(), **_peers()},
        "model": {**asdict(model), "folder": options.folder.name},
        "job": {name: getattr(options, name) for name in ("new_tokens", "repeats", "rounds", "threads")}
        | {"prompt_tokens": options.prompt, "sequences": options.sequences},
        "bandwidth": bandwidth,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    target = options.results / f"{about['date']}-end-to-end-{options.name or model.kind}.md"
    target.write_text(page(rows, about))
    found = {**about, "rows": [asdict(row) for row in rows]}
    target.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(target.read_text())
    return 1 if any(row.status in ("failed", "wrong output") for row in rows) else 0


def command(options: argparse.Namespace, arguments: list[str]) -> str:
    """The command without this machine's folders: another machine has its own."""
    kept = [*arguments]
    for name in ("--work", "--results"):
        if name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
    names = {str(options.folder): "FOLDER", str(options.plain): "BF16_FOLDER"}
    return " ".join(["python benchmarks/end_to_end.py", *(names.get(each, each) for each in kept)])


def _place_of(row: Row, options: argparse.Namespace, scratch: Path) -> Path:
    """The folder or file that an engine reads; a GGUF file is written unless it is there."""
    if not row.engine.startswith(LLAMA_CPP):
        return (options.plain or options.folder) if row.engine.startswith("transformers-") else options.folder
    target = (options.work or scratch) / f"{options.folder.name}-{row.experts}-{row.rest}.gguf"
    if not target.exists():
        print(f"writing {target}", file=sys.stderr, flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        write_gguf(options.folder, partial, storage_of(row.engine))
        partial.rename(target)
    row.bytes_per_token = read_bytes(target)
    return target


def _peers() -> dict[str, str]:
    return {name: version for name, version in installed.versions().items() if name in ("llama-cpp-python", "gguf")}


if __name__ == "__main__":
    sys.exit(main())
