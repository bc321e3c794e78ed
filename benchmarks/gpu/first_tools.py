"""What the first run asks of other programs: ncu, compute-sanitizer, the tests, and the benchmark of every layer."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu.items import Row
from moestro.bench.schema import points_of

ROOT = Path(__file__).resolve().parents[2]
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors_op_read.sum",
    "sm__inst_executed.sum",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
)
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNELS = "regex:gate_up_kernel|down_kernel|sum_slots_kernel|rows_kernel"
DEVICE_TESTS = (
    "tests/ops/test_expert_mlp_triton_real_plans.py",
    "tests/ops/test_expert_mlp_triton.py",
    "tests/ops/test_expert_mlp_triton_weights.py",
    "tests/ops/test_expert_mlp_triton_graphs.py",
    "tests/ops/test_expert_mlp_triton_unstacked.py",
    "tests/ops/test_grouping_triton.py",
    "tests/ops/test_topk_triton.py",
    "tests/ops/test_gpu.py",
)
_PLACES = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda*/nsight-compute*")
_MOST_ROWS, _TAIL = 64, 3000
_MOST_TESTING = 14
"""Processes, of which each takes some of the device's memory."""
_NOT_FOUND = 127
_AFTER_TABLE = 70.0
"""Seconds that the benchmark of every layer may take beyond its own budget."""

Command = Sequence[str]


def find(tool: str) -> str | None:
    """Where a program of CUDA's toolkit is; None if it is not."""
    places = [place for pattern in _PLACES for place in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(places))


def ran(command: Command, seconds: float, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command in the source tree: 127 where it is not there, 124 where it was ended."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(seconds, 1.0),
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    except FileNotFoundError as error:
        return _NOT_FOUND, str(error)
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def counter_rows(small: Command, seconds: float) -> list[Row]:
    """The counters of each of our kernels in a run of the small layer under ncu; a row that says why not without."""
    path = find("ncu")
    if path is None:
        return [_missing("ncu")]
    options = ["--csv", "--target-processes", "all", "--kernel-name", KERNELS, "--metrics", ",".join(METRICS)]
    code, said = ran([path, *options, *small], seconds)
    rows = parsed(said)
    if not rows:
        return [{"tool": "ncu", "status": "failed", "reason": f"it ended with code {code}", "tail": said[-_TAIL:]}]
    return [{"tool": "ncu", "status": "ok", **row} for row in rows[:_MOST_ROWS]]


def parsed(said: str) -> list[Row]:
    """The kernels of ncu's table, in the order of their launches, with their metrics by name."""
    lines = [line for line in said.splitlines() if line.startswith('"')]
    found: dict[str, Row] = {}
    for line in csv.DictReader(lines):
        name, value = line.get("Metric Name"), line.get("Metric Value")
        if name is None or value is None:
            continue
        row = found.setdefault(line.get("ID") or "", {"kernel": line.get("Kernel Name"), "metrics": {}, "units": {}})
        text = value.replace(",", "")
        row["metrics"][name] = float(text) if re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", text) else value
        row["units"][name] = line.get("Metric Unit")
    return list(found.values())


def sanitizer_rows(tool: str, small: Command, seconds: float) -> list[Row]:
    """What a tool of compute-sanitizer says of the small layer; each tensor has memory, and so bounds, of its own."""
    path = find("compute-sanitizer")
    if path is None:
        return [_missing("compute-sanitizer")]
    command = [path, "--tool", tool, "--error-exitcode", "9", *small]
    code, said = ran(command, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error", said)
    clean = code == 0 and summaries and all(count == "0" for count in summaries)
    status = "ok" if clean else "wrong" if summaries and code != 0 and any(c != "0" for c in summaries) else "failed"
    about = {"tool": f"compute-sanitizer {tool}", "status": status, "errors": [int(count) for count in summaries]}
    return [about if clean else {**about, "reason": f"it ended with code {code}", "tail": said[-_TAIL:]}]


def _missing(tool: str) -> Row:
    return {"tool": tool, "status": "skipped", "reason": f"{tool} is not on this machine"}


def test_rows(path: str, seconds: float) -> list[Row]:
    """How a file of tests went on the device, and which failed, also where its time was over before its end."""
    count = str(max(min(os.cpu_count() or 1, _MOST_TESTING), 1))
    # The plugin pytest-benchmark warns beside pytest-xdist, and the tests take warnings for errors.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:benchmark", "-n", count, "--maxprocesses", count, path]
    code, said = ran(command, seconds, TRITON_INTERPRET="0")
    last = said.strip().splitlines()[-1:] or [""]
    failed = list(dict.fromkeys(re.findall(r"\bFAILED (\S+::\S+)", said)))
    if "No module named pytest" in said or "unrecognized arguments: -n" in said:
        return [{"tool": path, "status": "skipped", "reason": "pytest and pytest-xdist are not on this machine"}]
    if code == 124:
        row: Row = {"tool": path, "status": "wrong" if failed else "skipped", "failed": failed}
        return [{**row, "reason": "it was ended, its time being over", "tail": said[-_TAIL:]}]
    row = {"tool": path, "status": "ok" if code in (0, 5) else "wrong", "summary": last[0], "failed": failed}
    return [row if row["status"] == "ok" else {**row, "reason": last[0], "tail": said[-_TAIL:]}]


def table_rows(page: Path, layers: str, seconds: float) -> list[Row]:
    """The rows of the benchmark of every layer, whose page is written to `page`."""
    budget = max(seconds - _AFTER_TABLE, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--gpu", "--results", folder]
        which = ["--all"] if layers == "all" else ["--layers", layers]
        code, said = ran([*command, *which, "--budget", str(round(budget))], seconds)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        pages = sorted(Path(folder).glob("*-gpu.md"))
        if pages:
            page.write_text(pages[-1].read_text())
    rows: list[Row] = [{"status": "wrong" if row["status"] == "wrong output" else row["status"], **_slim(row)}
                       for report in found for row in points_of(report)]  # fmt: skip
    goals = [{"status": "ok", "goals": report["goals"]} for report in found if "goals" in report]
    if not rows:
        return [{"tool": "run.py", "status": "failed", "reason": f"it ended with code {code}", "tail": said[-_TAIL:]}]
    return [*goals, *rows]


def _slim(row: Row) -> Row:
    return {name: value for name, value in row.items() if value not in (None, {}, []) and name != "status"}
