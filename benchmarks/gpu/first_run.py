"""The first run on a GPU, step by step: each one command under nine minutes, all of them eight files at most.

    PYTHONPATH=src python benchmarks/gpu/first_run.py correctness --results found    plans and tests, before any timing
    PYTHONPATH=src python benchmarks/gpu/first_run.py layers --results found         against torch's grouped_mm
    PYTHONPATH=src python benchmarks/gpu/first_run.py counters --results found       ncu and compute-sanitizer
    PYTHONPATH=src python benchmarks/gpu/first_run.py sweep --results found          prepared plans
    PYTHONPATH=src python benchmarks/gpu/first_run.py winners --results found        `layers` again, with the best plans
    PYTHONPATH=src python benchmarks/gpu/first_run.py table --results found          every layer, format and peer

A step that ran out of time says what was left, and goes on there when it is run again; --again begins anew. Exit codes:
0 all was done, 1 something failed or was wrong, 2 it could not begin, 3 time ran out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # as a file in this folder, whose names are those of a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from gpu import first_checks, first_points, first_summary, first_tools, goals
from gpu.first_checks import Kernel
from gpu.first_points import Device
from gpu.items import REFUSED, Item, Record, Row, run_items, supervise
from moestro.bench import LayerSpec
from moestro.bench.layers import DENSE, Layer, named
from moestro.bench.measure import about
from moestro.ops import gpu
from moestro.ops.expert_mlp.triton_tuning import Plan

SECONDS, MOST_SECONDS = 480.0, 500.0
"""Of a step by default, and at most: it is to be below nine minutes with what stands before and after it."""
COMPILE_SHARE = 0.4
"""Of a step's time, that compiling its kernels ahead may take."""
MOST_PROCESSES = 14
LAYERS = ("olmoe", "mixtral", "qwen3-30b-a3b")
CHECKED = ("olmoe", "qwen3-30b-a3b", "mixtral", "gpt-oss-20b", "deepseek-v3", "llama4-scout", "mixtral-half")
TOKENS = (1, 16, 64, 4096, 16384)
SMALL = LayerSpec("small", "olmoe", 256, 128, 16, 2)
SMALL_TOKENS = (1, 16, 1024)
COMPILE = "compile"


@dataclass
class Run:
    """One step of a run.

    Attributes:
        step: its name.
        results: the folder of all files.
        device: where it runs.
        layers, tokens: what it measures.
        clock: in seconds.
        options: of the command line, for processes that help.
        record: what was found so far.
        held: the layer in memory.
    """

    step: str
    results: Path
    device: Device
    layers: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    clock: Callable[[], float] = time.time
    options: tuple[str, ...] = ()
    record: Record = field(default_factory=lambda: Record(""))
    held: list[Layer] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Of the step's file."""
        return file_of(self.results, self.step)

    def specs(self, names: Sequence[str]) -> list[LayerSpec]:
        """The layers asked for, or these."""
        return [named(name) for name in self.layers or names]

    def layer(self, spec: LayerSpec, most_tokens: int) -> Layer:
        """The whole layer; the one before is dropped first."""
        if not self.held or self.held[0].spec != spec:
            self.held.clear()
            self.held.append(first_points.make_layer(self.device, spec, most_tokens))
        return self.held[0]

    def target(self) -> gpu.Device:
        """What plans are made for."""
        return gpu.device_of(torch.empty(0, device=self.device.kind))

    def rates(self) -> dict[str, float]:
        """FLOP a second by probe, as this step measured them."""
        roofs = [row["roof"]["flops_per_second"] for row in self.record.rows if "roof" in row]
        return dict(roofs[-1]) if roofs else {}


def file_of(results: Path, step: str) -> Path:
    """The file of a step."""
    return results / f"{step}.json"


def correctness(run: Run) -> list[Item]:
    """Tensor maps first, then every plan, then the tests on the device."""
    specs = run.specs(CHECKED)
    items = [Item(f"maps {s.name}", lambda left, s=s: first_checks.map_rows(run.device, s)) for s in specs]  # type: ignore[misc]
    items.append(_compile_ahead(run))
    for kernel in kernels_of(run):
        items.append(Item(f"plan {kernel}", lambda left, k=kernel: first_checks.check_rows(run.device, k)))  # type: ignore[misc]
    tests = first_tools.DEVICE_TESTS
    return [
        *items,
        *(Item(f"tests {path}", partial(first_tools.test_rows, path), 40.0, ends_itself=True) for path in tests),
    ]


def layers(run: Run) -> list[Item]:
    """The roof, then each layer at each number of tokens, by the plans that calls get."""
    return _points(run, {})


def winners(run: Run) -> list[Item]:
    """The same by the best plans of the sweep, where it found one."""
    sweep = Record.load(file_of(run.results, "sweep"), "sweep")
    found = first_points.winners(sweep.rows)
    run.record.failed.pop("plans", None)
    if not found:
        run.record.failed["plans"] = "the sweep has found none: run it first"
    return _points(run, found) if found else []


def _points(run: Run, plans: dict[tuple[str, int], Plan]) -> list[Item]:
    tokens = run.tokens or TOKENS

    def point(left: float, spec: LayerSpec, num_tokens: int) -> list[Row]:
        layer = run.layer(spec, max(tokens))
        how = plans.get((spec.name, num_tokens))
        rows = first_points.measure_point(run.device, layer, num_tokens, run.rates(), how)
        return [{**row, "plan": None if how is None else str(how)} for row in rows]

    items = [Item("roof", lambda left: first_points.roof_rows(run.device)), _compile_ahead(run)]
    for spec in run.specs(LAYERS):
        items += [
            Item(f"point {spec.name} T={t}", partial(point, spec=spec, num_tokens=t), 10.0)
            for t in tokens
            if not plans or (spec.name, t) in plans
        ]
    return items


def counters(run: Run) -> list[Item]:
    """One small layer on its own, then under ncu and each tool of compute-sanitizer."""
    small = (sys.executable, str(Path(__file__).resolve()), "small", "--results", str(run.results))

    def alone(left: float) -> list[Row]:
        code, said = first_tools.ran(small, left)
        status, reason = ("ok", None) if code == 0 else ("wrong", said[-3000:])
        return [{"tool": "none", "status": status, "reason": reason}]

    sanitizers = [
        Item(
            f"sanitizer {tool}", _shared(partial(first_tools.sanitizer_rows, tool, small), 0.6), 20.0, ends_itself=True
        )
        for tool in first_tools.SANITIZERS
    ]
    ncu = Item("ncu", _shared(partial(first_tools.counter_rows, small), 0.5), 20.0, ends_itself=True)
    return [Item("alone", alone, ends_itself=True), ncu, *sanitizers]


def _shared(rows: Callable[[float], list[Row]], share: float) -> Callable[[float], list[Row]]:
    """The same with a share of the time that is left."""
    return lambda left: rows(left * share)


def sweep(run: Run) -> list[Item]:
    """Prepared plans of each layer at each number of tokens, which share the time that is left."""
    specs, tokens = run.specs(LAYERS), run.tokens or TOKENS
    names = [f"sweep {s.name} T={t}" for s in specs for t in tokens]

    def point(left: float, spec: LayerSpec, num_tokens: int) -> list[Row]:
        waiting = sum(name not in run.record.done and name not in run.record.failed for name in names)
        layer = run.layer(spec, max(tokens))
        return first_points.sweep_point(run.device, layer, num_tokens, left / max(waiting, 1), run.clock)

    pairs = [(spec, t) for spec in specs for t in tokens]
    named_pairs = zip(names, pairs, strict=True)
    points = [Item(name, partial(point, spec=s, num_tokens=t), 5.0, ends_itself=True) for name, (s, t) in named_pairs]
    return [_compile_ahead(run), *points]


def table(run: Run) -> list[Item]:
    """Every layer in every format beside every peer that is here, within the rest of the time."""
    which = "all" if run.layers is None else ",".join(run.layers)
    return [Item("table", partial(first_tools.table_rows, run.results / "table.md", which), 60.0, ends_itself=True)]


STEPS: dict[str, Callable[[Run], list[Item]]] = {
    step.__name__: step for step in (correctness, layers, counters, sweep, winners, table)
}


def kernels_of(run: Run) -> list[Kernel]:
    """What a step compiles."""
    device = run.target()
    if run.step == "correctness":
        return first_checks.kernels(device, run.specs(CHECKED), tokens=run.tokens or first_checks.TOKENS)
    found = first_checks.kernels(device, run.specs(LAYERS), (DENSE,), run.tokens or TOKENS)
    if run.step == "winners":
        plans = first_points.winners(Record.load(file_of(run.results, "sweep"), "sweep").rows)
        return [replace(kernel, how=plans.get((kernel.spec.name, kernel.num_tokens), kernel.how)) for kernel in found]
    if run.step == "sweep":
        return [replace(kernel, how=how) for kernel in found for how in _prepared(kernel, device)]
    return found


def _prepared(kernel: Kernel, device: gpu.Device) -> list[Plan]:
    problem = first_checks.problem_of(kernel.spec, kernel.form, kernel.num_tokens)
    return first_points.prepared_plans(problem, device)


def _compile_ahead(run: Run) -> Item:
    """Processes that launch every kernel of the step once, so that its items find them in Triton's cache."""
    count = max(min(os.cpu_count() or 1, MOST_PROCESSES), 1)
    command = [sys.executable, str(Path(__file__).resolve()), run.step, *run.options, "--results", str(run.results)]

    def work(left: float) -> list[Row]:
        end = time.time() + left * COMPILE_SHARE
        running = [subprocess.Popen([*command, "--until", str(end), "--compile", f"{i}/{count}"]) for i in range(count)]
        ended = 0
        for process in running:
            try:
                process.wait(max(end - time.time(), 0.1))
            except subprocess.TimeoutExpired:
                ended += 1
            finally:
                process.kill()
                process.wait()
        return [{"status": "ok", "processes": count, "ended": ended}]

    return Item(COMPILE, work, 30.0, ends_itself=True)


def small(device: Device) -> int:
    """The small layer in two formats at a few numbers of tokens, against the reference: what the tools look at."""
    said = []
    for form in (DENSE, "mxfp4"):
        for num_tokens in SMALL_TOKENS:
            kernel = Kernel(SMALL, form, num_tokens, first_checks.choose(SMALL, form, num_tokens, _target(device)))
            said += [row["reason"] for row in first_checks.output_rows(device, kernel) if row["status"] != "ok"]
    print("\n".join(said) or "every output is right")
    return 1 if said else 0


def _target(device: Device) -> gpu.Device:
    return gpu.device_of(torch.empty(0, device=device.kind))


def work(run: Run, end: float) -> int:
    """Do the step's items that are open until the time is over; returns the exit code."""
    run.record = Record.load(run.path, run.step)
    run.record.about = run.record.about or about(run.device.kind)

    def save(record: Record) -> None:
        record.save(run.path)
        first_summary.write(run.results, list(STEPS))

    with torch.inference_mode():
        code = run_items(run.record, STEPS[run.step](run), save, end, run.clock, run.device.kind)
    print(first_summary.line(run.record), flush=True)
    for name, why in {**run.record.failed, **run.record.left}.items():
        print(f"  {name}: {why}", flush=True)
    return code


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("step", choices=[*STEPS, "small"])
    made.add_argument("--results", type=Path, required=True, help="folder of the files")
    made.add_argument("--seconds", type=float, default=SECONDS, help=f"budget of the step, at most {MOST_SECONDS:.0f}")
    made.add_argument("--layers", help="names, separated by commas")
    made.add_argument("--tokens", help="numbers, separated by commas")
    made.add_argument("--again", action="store_true", help="forget what the step has found")
    made.add_argument("--until", type=float, help=argparse.SUPPRESS)
    made.add_argument("--compile", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None, make_device: Callable[[], Device] = first_points.cuda) -> int:
    """Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    reason = goals.missing() if make_device is first_points.cuda else None
    if options.seconds > MOST_SECONDS or options.seconds <= 0:
        reason = f"--seconds {options.seconds:g}: a step has more than 0 and at most {MOST_SECONDS:.0f}"
    if reason is not None:
        print(f"first_run.py: {reason}", file=sys.stderr)
        return REFUSED
    if options.until is None and options.compile is None and options.step != "small":
        return _supervised(options, given)
    device = make_device()
    if options.step == "small":
        with torch.inference_mode():
            return small(device)
    names = None if options.layers is None else tuple(options.layers.split(","))
    tokens = None if options.tokens is None else tuple(map(int, options.tokens.split(",")))
    run = Run(options.step, options.results, device, names, tokens, options=_passed_on(options))
    if options.compile is not None:
        index, count = map(int, options.compile.split("/"))
        with torch.inference_mode():
            share = itertools.takewhile(lambda kernel: time.time() < options.until, kernels_of(run)[index::count])
            print(*first_checks.compile_kernels(device, share), sep="\n", file=sys.stderr)
        return 0
    return work(run, options.until)


def _passed_on(options: argparse.Namespace) -> tuple[str, ...]:
    pairs = (("--layers", options.layers), ("--tokens", options.tokens))
    return tuple(part for name, value in pairs if value is not None for part in (name, value))


def _supervised(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run the step in a process of its own, and again behind the item at which one ended."""
    path, end = file_of(options.results, options.step), time.time() + options.seconds
    record = Record(options.step) if options.again else Record.load(path, options.step)
    record.done.pop(COMPILE, None)  # Triton's cache may be another machine's
    record.save(path)
    command = [sys.executable, str(Path(__file__).resolve()), *given, "--until", str(end)]
    return supervise(command, options.step, path, end)


if __name__ == "__main__":
    sys.exit(main())
