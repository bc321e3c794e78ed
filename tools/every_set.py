"""The core tests, once for each instruction set that this processor has below its best.

    python tools/every_set.py [avx512 avx2 ...]

The tests as they are run with the best; here the features that better sets need are masked, in the engine and, where it
has such a switch, in PyTorch. Sets that this processor lacks are named. The exit code is that of the first run that
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moestro import settings
from moestro.ops import native

ROOT = Path(__file__).parents[1]

TESTS = (
    "tests/test_layer.py",
    "tests/test_experts.py",
    "tests/ops/test_attention.py",
    "tests/ops/test_dispatch.py",
    "tests/ops/test_expert_mlp_cpu.py::test_any_layer_meets_the_reference",
    "tests/ops/test_expert_mlp_cpu.py::test_strided_experts_rows_and_tokens",
    "tests/ops/test_expert_mlp_bits.py::test_any_choice_of_rows",
    "tests/ops/test_expert_mlp_input_formats.py",
    "tests/ops/test_norm.py",
    "tests/ops/test_plan_counts.py",
    "tests/ops/test_projection.py",
    "tests/ops/test_routing_step.py",
    "tests/ops/test_steps.py",
    "tests/ops/test_topk_cpu.py",
    "tests/routing/test_routing_cpu.py",
    "tests/hf/test_dense.py",
    "tests/hf/test_expert_steps.py",
    "tests/hf/test_experts.py",
    "tests/hf/test_norms_and_routers.py",
    "tests/hf/test_steps.py",
)
"""Those of the engine, the layer, and the seam to Transformers. What forces a set by its name is the same with a mask,
and the tests as they are run it with every set; here it is what draws the whole call."""

WITHOUT = (
    "tests/test_layer.py::test_compiles_with_the_default_backend",
    "tests/test_layer.py::test_compiles_whole_and_exports_with_any_number_of_tokens",
    "tests/test_layer.py::test_gradients_through_a_compiled_layer",
    "tests/test_experts.py::test_quantising_is_that_of_each_expert",
    "tests/ops/test_dispatch.py::test_nothing_is_kept_of_weights_that_are_gone",
    "tests/ops/test_dispatch.py::test_threads_that_prepare_at_once",
    "tests/ops/test_expert_mlp_input_formats.py::test_in_a_graph",
    "tests/ops/test_expert_mlp_input_formats.py::test_no_gradient_is_given_and_none_is_zero_in_silence",
    "tests/ops/test_expert_mlp_input_formats.py::test_plain_torch_meets_the_definition",
    "tests/ops/test_expert_mlp_input_formats.py::test_the_definition_by_rationals",
    "tests/ops/test_plan_counts.py::test_ids_that_another_thread_writes_are_never_followed",
    "tests/ops/test_topk_cpu.py::test_children_of_a_fork_rank_and_group_too",
    "tests/hf/test_experts.py::test_compiles_without_a_first_run",
)
"""Of these, what takes long and is the same with every set: PyTorch's compilers, to which the engine is one node of a
graph; formats, which PyTorch packs, and their definition, which it computes; calls that are kept, in Python; ids and
scores, which are read in code that is compiled once for all sets."""

MASKS: dict[str, dict[str, str]] = {
    "avx512-bf16": {settings.MASK_VARIABLE: "amx_tile", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512-vnni": {settings.MASK_VARIABLE: "amx_tile avx512_bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512": {settings.MASK_VARIABLE: "amx_tile avx512_vnni avx512_bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2-vnni": {settings.MASK_VARIABLE: "avx512f", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx2": {settings.MASK_VARIABLE: "avx512f avx_vnni", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    # PyTorch's own compiler writes code that does not compile below AVX2.
    "portable": {settings.MASK_VARIABLE: "avx512f avx2", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "avx2"},
}
"""Of a set: the variables under which it is the best. The first of all sets needs none."""

FIRST = "from moestro.ops import native; print(next(isa.name for isa in native.ISAS if isa.runs_here))"


def run(name: str, workers: int) -> int:
    """Run the tests with a set as the best one, in so many workers (0: in one process); the exit code."""
    environment = {**os.environ, **MASKS[name]}
    first = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True)
    if first.stdout.strip() != name:
        print(f"{name}: masked so, {first.stdout.strip()} is the best", flush=True)
        return 1
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"-n{workers}", *(f"--deselect={test}" for test in WITHOUT), *TESTS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start
    print(f"{done.stdout}{name}: exit code {done.returncode} after {seconds:.0f} s", flush=True)
    return done.returncode


def main(names: list[str]) -> int:
    """Run the tests with each of the sets, or with those named; the exit code of the first that failed, or 0."""
    missing = native.missing()
    if missing is not None:
        print(missing)
        return 1
    best = next(isa.name for isa in native.ISAS if isa.runs_here)
    wanted = []
    for isa in native.ISAS:
        if names and isa.name not in names:
            continue
        reason = native.reason(isa)
        if reason is not None or isa.name not in MASKS or (isa.name == best and not names):
            print(f"{isa.name}: {reason or 'runs with the tests as they are'}", flush=True)
        else:
            wanted.append(isa.name)
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:  # a set for each core, with nothing but its own imports
        workers = 0 if len(wanted) >= cores else cores // max(len(wanted), 1)
        codes = list(pool.map(run, wanted, [workers] * len(wanted)))
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
