"""What quantising and dequantising take beside the weight and the result, as the operating system counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch
from moestro.formats import dequantize, quantize

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

def extra(call, *arguments):
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = status("VmRSS")
    result = call(*arguments)
    return status("VmHWM") - before - result.nbytes / 2**20

weight = torch.zeros(1, 3072, 2048, dtype=torch.bfloat16)
weight[:, :, ::7] = 0.25
found = {}
for name in sys.argv[1:]:
    packed = quantize(weight, name)
    quantize(weight[:, :256], name, "mse")
    for search in ("nearest", "mse"):
        found[name, search] = extra(quantize, weight, name, search)
    for dtype in (torch.float32, torch.bfloat16):
        found[name, str(dtype)] = extra(dequantize, packed, dtype)
    del packed
print(json.dumps([[*key, value] for key, value in found.items()]))
"""
"""The weight as float32 takes 24 MiB, and twice or thrice that in a walk that is not by panels."""

MOST_MIB = 12
FORMATS = ["fp8-e4m3-tensor", "int4-g32-zp", "mxfp4"]
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that memory that was freed is not there to be used again unseen."""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_a_few_mib_beside_weight_and_result() -> None:
    environment = {**os.environ, **GIVE_BACK}
    command = [sys.executable, "-c", PROGRAM, *FORMATS]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(run.stdout)
    assert len(found) == 4 * len(FORMATS)
    assert [row for row in found if row[2] > MOST_MIB] == []
    assert sum(row[2] for row in found) > 1  # MiB: what is counted is there
