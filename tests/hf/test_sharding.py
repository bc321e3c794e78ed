"""Models cut over processes: what stored experts cannot do yet is refused on every rank, in words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import moestro

transformers = pytest.importorskip("transformers")

RANK = """
import sys
import torch.distributed
import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
import moestro.hf
from moestro.errors import UnsupportedError
from moestro.hf import MoestroConfig

transformers.logging.set_verbosity_error()
folder, stored, sizes = sys.argv[1], sys.argv[2], dict(zip(("tp_size", "ep_size"), map(int, sys.argv[3].split(","))))
for source, how in ((folder, {"quantization_config": MoestroConfig("int4-g32")}), (stored, {})):
    try:
        AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**sizes), **how)
    except UnsupportedError as error:
        print(torch.distributed.get_rank(), error)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("sizes", ["2,1", "2,2"], ids=["tensor parallel", "expert parallel"])
def test_stored_experts_are_not_cut_in_silence(made, tmp_path, sizes):
    (tmp_path / "rank.py").write_text(RANK)
    moestro.load(made.wide(), format="int4-g32").save_pretrained(tmp_path / "stored")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py"), str(made.wide()), str(tmp_path / "stored"), sizes],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if "stored experts are not cut over processes yet" in line]
    assert sorted(line[0] for line in lines) == ["0", "0", "1", "1"], done.stdout + done.stderr
    assert all("got experts that stay as stored, and tp_size=2" in line for line in lines)
