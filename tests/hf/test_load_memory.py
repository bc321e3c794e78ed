"""What loading takes: at most the model's final size, and two of its largest tensors beside it.

Each case runs in a process of its own, a fork, which has loaded a tiny checkpoint before, so that what Python and
Transformers take for themselves is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest

import make_checkpoint as mc
from cli.conftest import IMPORTS
from forked import python
from published import PUBLISHED
from published.family import merge

SMALL = {"num_hidden_layers": 3, "vocab_size": 4096, "eos_token_id": 1, "pad_token_id": 0}
SIZES = {
    "qwen3-30b-a3b": {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "head_dim": 64},
    "qwen3-30b-a3b-fp8": {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32},
    "gpt-oss-20b": {"hidden_size": 1024, "intermediate_size": 1024},
}
NOISE = 8 << 20
"""Pages of libraries that the second load touches first, and what the allocator keeps."""

MEASURE = """
import json, sys
from pathlib import Path
import moestro, moestro.hf, transformers
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
def status():
    pairs = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {k: int(v.split()[0]) << 10 for k, v in pairs if k in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}
tiny, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
moestro.load(tiny, **options)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
before = status()
model = moestro.load(folder, **options)
after = status()
tensors = {n: t.nbytes for n, t in model.state_dict().items()}
experts = sum(v for n, v in tensors.items() if ".experts." in n and "bias" not in n)
print(json.dumps({
    "peak": after["VmHWM"] - before["VmRSS"], "anonymous": after["RssAnon"] - before["RssAnon"],
    "final": sum(tensors.values()), "experts": experts, "layout": moestro.hf.served(model)[0].layout,
}))
"""


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """Checkpoints of some 200 MB: (folder, bytes of the largest tensor, bytes of all)."""
    found = {}

    def make(like):
        if like not in found:
            config = merge(PUBLISHED[like].config, SMALL | SIZES[like])
            PUBLISHED["medium"] = dataclasses.replace(PUBLISHED[like], config=config, generation=None)
            try:
                planned = mc.plan(mc.Request("medium"))
            finally:
                del PUBLISHED["medium"]
            folder = tmp_path_factory.mktemp("medium") / like
            mc.write(planned, folder, shard_bytes=planned.nbytes)
            found[like] = (folder, max(item.spec.nbytes for item in planned.items), planned.nbytes)
        return found[like]

    return make


def measured(made, medium, like, **options):
    folder, largest, nbytes = medium(like)
    command = [*python(*IMPORTS), "-c", MEASURE, str(made.folder(like)), str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert nbytes > 150_000_000
    return json.loads(done.stdout), largest, nbytes


@pytest.mark.parametrize("like", SIZES)
def test_mapped_experts_take_no_memory(made, medium, like):
    """Only what is not mapped counts: where FP8 linears are dequantised, those in the model's dtype."""
    found, largest, nbytes = measured(made, medium, like)
    assert "memory-mapped" in found["layout"]
    assert found["experts"] > nbytes / 2
    rest = found["final"] - found["experts"]
    assert found["peak"] <= rest + 2 * largest + NOISE
    assert found["peak"] < nbytes / 2


@pytest.mark.parametrize(("like", "name"), [("qwen3-30b-a3b", "mxfp4"), ("gpt-oss-20b", "int8")])
def test_quantising_holds_the_result_and_no_more(made, medium, like, name):
    found, largest, _ = measured(made, medium, like, format=name)
    assert found["layout"] == f"{name}, in memory"
    assert found["experts"] * 0.95 <= found["anonymous"]
    assert found["peak"] <= found["final"] + 2 * largest + NOISE


def test_fp8_to_another_format_and_dtype(made, medium):
    found, largest, nbytes = measured(made, medium, "qwen3-30b-a3b-fp8", format="int4-g32", dtype="float32")
    assert found["layout"] == "int4-g32, in memory"
    assert found["peak"] <= found["final"] + 2 * largest + NOISE
    assert found["peak"] < 1.5 * nbytes
