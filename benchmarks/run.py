"""Run the benchmarks and keep what they found under benchmarks/results, dated.

python benchmarks/run.py                          every named layer at every point
python benchmarks/run.py --layers olmoe,mixtral   those
python benchmarks/run.py --formats int8,mxfp4     on quantised weights, against peers of as many bits
python benchmarks/run.py --op topk                one operation, or all of them with --op all
python benchmarks/run.py --gpu --all              on the CUDA device: layers, formats, peers, in seven minutes
python benchmarks/run.py --gpu --layers mixtral   on it, those layers
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from gpu import crash_isolated, goals, sweep
from moestro import machine
from moestro.bench import LAYERS, Plan, Report, Row, ours, run
from moestro.bench.failures import DeviceLostError
from moestro.bench.layers import named
from moestro.bench.measure import versions
from moestro.bench.peers import named_peers, plain_reads
from moestro.bench.plot import roofline
from moestro.errors import MoestroError
from operations import markdown as op_markdown
from operations import run_op
from page import markdown
from registry import BENCHMARKS

RESULTS = Path(__file__).parent / "results"
TOKENS = (1, 4, 16, 128, 512, 2048)
AFTER_SECONDS = 45.0
"""Beyond the budget of a GPU's run, for the point that it ends in."""
NOT_ENDED = "this run did not end: points are missing"
"""A note of a page that is written before each point, for a run that is broken off."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if an output was wrong, 2 for bad arguments, 130 if it was broken off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--gpu", action="store_true", help="on the CUDA device, with defaults of its own")
    parser.add_argument("--all", action="store_true", help="every layer, which is the default too")
    parser.add_argument("--layers", default="all", help=f"of {', '.join(LAYERS)}, separated by commas, or all")
    parser.add_argument("--formats", help="of moestro's weights; dense, the default, is the dtype's")
    parser.add_argument("--dtypes", help="of x, and of dense weights; float32,bfloat16, on a GPU bfloat16")
    parser.add_argument("--peers", help="names, or all, or none; all, on a GPU those that run there")
    parser.add_argument("--tokens", help=f"{','.join(map(str, TOKENS))}; on a GPU {','.join(map(str, goals.TOKENS))}")
    parser.add_argument("--seconds", type=float, help=f"for each variant at each point; 1, on a GPU {goals.SECONDS}")
    parser.add_argument("--budget", type=float, default=goals.BUDGET, help="seconds for a whole run on a GPU")
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--name", help="of the files; default: layers, gpu, or the operation")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        if options.gpu:
            return _gpu(options, sys.argv[1:] if arguments is None else arguments)
        return _ops(options) if options.op else _layers(options)
    except (MoestroError, ValueError, AttributeError) as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return 2


def _layers(options: argparse.Namespace) -> int:
    names = list(LAYERS) if options.layers == "all" else options.layers.split(",")
    plan = Plan(
        layers=tuple(named(name) for name in names),
        tokens=_counts(options.tokens) or TOKENS,
        dtypes=_dtypes(options.dtypes or "float32,bfloat16"),
        ours=tuple(ours("auto", name) for name in (options.formats or "dense").split(",")),
        peers=tuple(named_peers((options.peers or "all").split(","))),
        seconds=options.seconds or 1.0,
    )
    plan = replace(plan, reads=plain_reads(plan.ours, plan.device))
    name = options.name or "layers"
    unfinished: set[Path] = set()

    def so_far(report: Report) -> None:
        if report.rows:
            notes = {**report.notes, "run": [*report.notes.get("run", []), NOT_ENDED]}
            partial = replace(report, command=_command(), notes=notes)
            unfinished.add(_keep(options, f"{name}-unfinished", markdown(partial), partial.as_json()))

    try:
        report = run(plan, _say, so_far)
    except KeyboardInterrupt:
        _say(f"benchmarks/run.py: broken off; measured so far: {', '.join(map(str, unfinished)) or 'nothing'}")
        return 130
    report.command = _command()
    _picture(report, _write(options, name, markdown(report), report.as_json()))
    for page in unfinished:
        page.unlink()
        page.with_suffix(".json").unlink()
    return 1 if report.wrong else 0


def _gpu(options: argparse.Namespace, arguments: list[str]) -> int:
    """A page for each layer and one for them all, measured by processes of their own: a broken kernel ends only one."""
    reason = goals.missing()
    if reason is not None:
        print(f"benchmarks/run.py --gpu: {reason}", file=sys.stderr)
        return 2
    if options.state is not None:
        return _measure_gpu(options)
    plan, end = gpu_plan(options), time.time() + options.budget
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "found"
        command = [sys.executable, __file__, *arguments, "--until", str(end), "--state", str(state)]
        code = crash_isolated.supervise(command, plan, state, end + AFTER_SECONDS, _say)
        reports = _reports(sweep.Found.load(state))
    if not reports:
        return code
    pages = _pages(options, reports)
    for layer, page in pages.items():
        _picture(reports[layer], page)
    print(goals.summary(list(reports.values())))
    return 1 if any(report.wrong for report in reports.values()) else code


def _measure_gpu(options: argparse.Namespace) -> int:
    """Measure, or go on measuring, until the time that was given."""
    plan, found = gpu_plan(options), sweep.Found.load(options.state)
    if options.until is not None:
        plan = replace(plan, budget=max(options.until - time.time(), 1e-3))

    def on_point(text: str) -> None:
        found.save(options.state)
        _say(text)

    try:
        found.save(options.state)
        for _ in sweep.run_stages(plan, found, on_point):
            _pages(options, _reports(found))
    except DeviceLostError as error:
        print(f"the device is lost: {error}", file=sys.stderr)
        return sweep.LOST
    finally:
        found.save(options.state)
    return 0


def _reports(found: sweep.Found) -> dict[str, Report]:
    return {layer: report for layer, report in found.reports.items() if report.rows}


def _pages(options: argparse.Namespace, reports: dict[str, Report]) -> dict[str, Path]:
    """Write the page of each layer and the one of all; returns the former by layer."""
    name, found = options.name or "gpu", list(reports.values())
    for report in found:
        report.command = _command()
    _keep(options, name, goals.summary(found), {"goals": goals.goals(_rows(found)), "rows": []})
    pages = {layer: (markdown(report), report.as_json()) for layer, report in reports.items()}
    return {layer: _keep(options, f"{name}-{layer}", *page) for layer, page in pages.items()}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _picture(report: Report, page: Path) -> None:
    """The roofline beside a page, where there is something to draw and what draws it."""
    if any(row.status == "ok" for row in report.rows):
        try:
            roofline(report, page.with_suffix(".png"))
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)


def gpu_plan(options: argparse.Namespace) -> Plan:
    """The GPU's plan with what was asked for instead of its defaults."""
    names = goals.NAMES if options.all or options.layers == "all" else tuple(options.layers.split(","))
    formats = goals.FORMATS if options.formats is None else tuple(options.formats.split(","))
    plan = goals.default_plan(names, formats)
    return replace(
        plan,
        tokens=_counts(options.tokens) or plan.tokens,
        dtypes=plan.dtypes if options.dtypes is None else _dtypes(options.dtypes),
        peers=plan.peers if options.peers is None else tuple(named_peers(options.peers.split(","))),
        seconds=options.seconds or plan.seconds,
        budget=options.budget,
    )


def _rows(reports: list[Report]) -> list[Row]:
    return [row for report in reports for row in report.rows]


def _counts(text: str | None) -> tuple[int, ...]:
    counts = text.split(",") if text else []
    if not all(count.isdecimal() for count in counts):
        raise ValueError(f"--tokens {text}: it takes numbers of tokens, separated by commas, 1,16 say")
    return tuple(map(int, counts))


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in text.split(","))


def _ops(options: argparse.Namespace) -> int:
    names = list(BENCHMARKS) if options.op == "all" else [options.op]
    rows = [row for name in names for row in run_op(BENCHMARKS[name], options.seconds or 1.0)]
    found = {"command": _command(), "machine": machine.describe(), "versions": versions(), "rows": [*map(asdict, rows)]}
    about = ", ".join(f"{k} {v}" for k, v in {"machine": machine.processor_name(), **versions()}.items())
    text = f"# Operations, {datetime.date.today()}\n\n{about}\n\n`{_command()}`\n\n{op_markdown(rows)}"
    _write(options, options.name or f"op-{options.op}", text, found)
    return 1 if any(row.status != "ok" for row in rows) else 0


def _command() -> str:
    given = " ".join(["python benchmarks/run.py", *sys.argv[1:]])
    return given.partition(" --until ")[0]


def _write(options: argparse.Namespace, name: str, text: str, found: dict[str, object]) -> Path:
    target = _keep(options, name, text, found)
    print(text)
    return target


def _keep(options: argparse.Namespace, name: str, text: str, found: dict[str, object]) -> Path:
    options.results.mkdir(parents=True, exist_ok=True)
    target = options.results / f"{datetime.date.today()}-{name}.md"
    target.write_text(text)
    target.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return target


if __name__ == "__main__":
    sys.exit(main())
