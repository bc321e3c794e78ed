"""Run the benchmarks and keep what they found under benchmarks/results, dated.

python benchmarks/run.py                          every named layer at every point
python benchmarks/run.py --layers olmoe,mixtral   those
python benchmarks/run.py --formats int8,mxfp4     on quantised weights, against peers of as many bits
python benchmarks/run.py --op topk                one operation, or all of them with --op all
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from registry import BENCHMARKS

from moestro import machine
from moestro.bench import LAYERS, Plan, ours, run
from moestro.bench.layers import named
from moestro.bench.measure import versions
from moestro.bench.ops import markdown as op_markdown
from moestro.bench.ops import run_op
from moestro.bench.peers import named_peers
from moestro.bench.plot import roofline
from moestro.bench.report import markdown
from moestro.errors import MoestroError

RESULTS = Path(__file__).parent / "results"
TOKENS = (1, 4, 16, 128, 512, 2048)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if an output was wrong, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--layers", default="all", help=f"of {', '.join(LAYERS)}, separated by commas, or all")
    parser.add_argument("--formats", default="dense", help="of moestro's weights; dense is the dtype's")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of x, and of weights that are not quantised")
    parser.add_argument("--peers", default="all", help="names, or all, or none")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each variant at each point")
    parser.add_argument("--name", help="of the files; default: layers, or the operation")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    try:
        return _ops(options) if options.op else _layers(options)
    except (MoestroError, ValueError, AttributeError) as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return 2


def _layers(options: argparse.Namespace) -> int:
    names = list(LAYERS) if options.layers == "all" else options.layers.split(",")
    plan = Plan(
        layers=tuple(named(name) for name in names),
        tokens=tuple(int(count) for count in options.tokens.split(",")),
        dtypes=tuple(getattr(torch, name) for name in options.dtypes.split(",")),
        ours=tuple(ours("auto", name) for name in options.formats.split(",")),
        peers=tuple(named_peers(options.peers.split(","))),
        seconds=options.seconds,
    )
    report = run(plan, lambda text: print(text, file=sys.stderr))
    report.command = _command()
    target = _write(options, options.name or "layers", markdown(report), report.as_json())
    if any(row.status == "ok" for row in report.rows):
        roofline(report, target.with_suffix(".png"))
    return 1 if report.wrong else 0


def _ops(options: argparse.Namespace) -> int:
    names = list(BENCHMARKS) if options.op == "all" else [options.op]
    rows = [row for name in names for row in run_op(BENCHMARKS[name], options.seconds)]
    found = {"command": _command(), "machine": machine.describe(), "versions": versions(), "rows": [*map(asdict, rows)]}
    about = ", ".join(f"{k} {v}" for k, v in {"machine": machine.processor_name(), **versions()}.items())
    text = f"# Operations, {datetime.date.today()}\n\n{about}\n\n`{_command()}`\n\n{op_markdown(rows)}"
    _write(options, options.name or f"op-{options.op}", text, found)
    return 1 if any(row.status != "ok" for row in rows) else 0


def _command() -> str:
    return " ".join(["python benchmarks/run.py", *sys.argv[1:]])


def _write(options: argparse.Namespace, name: str, text: str, found: dict[str, object]) -> Path:
    target = options.results / f"{datetime.date.today()}-{name}.md"
    target.write_text(text)
    target.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)
    return target


if __name__ == "__main__":
    sys.exit(main())
