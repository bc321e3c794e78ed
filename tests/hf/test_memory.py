"""Models within a memory budget: the bits of the whole model, no byte too many, and errors that say what to do."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import pickle
import shutil
import signal
import threading
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import moestro
from hf.checkpoints import FAMILIES, logits
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import FORMATS
from moestro.hf import MoestroConfig, served
from moestro.hf.memory import expert_memory, hits_line, memory_line
from moestro.hf.recording import recorded
from moestro.memory import POLICIES, MemoryBudget, Residents, slots
from moestro.memory.reader import Reader
from moestro.ops.dispatch import observed
from moestro.ops.expert_mlp import EXPERT_MLP

PROMPT = torch.arange(300).view(1, 300) * 7 % 60
FOUR = torch.arange(4).view(4, 1) * 11 % 60
ONLINE = [name for name in POLICIES if name in ("expected", "lru", "lfu", "layer_lfu")]


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch):
    monkeypatch.setattr(slots, "POISON", True)


def steps(model):
    """Logits of a prompt, of four sequences that go on by a token, and of one that goes on by three."""
    found = [logits(model, PROMPT), logits(model, FOUR)]
    with torch.no_grad():
        out = model(PROMPT[:, :40], use_cache=True)
        for token in (3, 17, 5):
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
    return found


def assert_same(model, wanted, about):
    for number, (found, right) in enumerate(zip(steps(model), wanted, strict=True)):
        assert torch.equal(found, right), (about, number)


def sizes(memory):
    """The budgets of interest: least, and one expert more, around a cycle, half, all."""
    each, least, cycle = (
        max(p.expert_bytes for p in memory.residents.pools),
        memory.residents.least,
        memory.residents.cycle,
    )
    found = (least, least + each, cycle - 1, cycle, memory.total_bytes // 2, memory.total_bytes)
    return [size for size in found if size >= least]


def budgets(folder, **options):
    return sizes(expert_memory(moestro.load(folder, memory="1GB", **options)))


def check_bookkeeping(memory):
    told, counts = memory.statistics(), memory.reader.counts
    assert memory.slot_bytes <= memory.budget.nbytes
    assert sum(told[part]["read_bytes"] for part in ("prompt", "decode")) == counts["bytes"]
    assert counts["requests"] == sum(told[p]["lookups"] - told[p]["hits"] for p in ("prompt", "decode"))
    for layer in memory.layers:
        for expert, slot in memory.residents.resident(layer.index).items():
            assert layer.pool.holds[slot] == (layer.index, expert)


@pytest.mark.parametrize("like", FAMILIES)
def test_bits_are_those_of_the_whole_model(made, like):
    folder = made.folder(like)
    wanted, policies = steps(moestro.load(folder)), itertools.cycle(ONLINE)
    for number, size in enumerate(budgets(folder)):
        budget = MemoryBudget(size, next(policies), 1 if number % 2 else 4)
        model = moestro.load(folder, memory=budget)
        assert_same(model, wanted, budget)
        check_bookkeeping(expert_memory(model))


@pytest.mark.parametrize("policy", ONLINE)
def test_every_policy(made, policy):
    folder = made.folder("qwen3-30b-a3b")
    wanted = steps(moestro.load(folder))
    for size in budgets(folder)[::2]:
        assert_same(moestro.load(folder, memory=MemoryBudget(size, policy)), wanted, (policy, size))


@pytest.fixture(scope="module")
def quantised(made, tmp_path_factory):
    """The same experts in every format that stores such shapes, as `save_pretrained` writes them."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("formats") / name
            moestro.load(made.wide(), format=name).save_pretrained(folders[name])
        return folders[name]

    return make


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format(quantised, name):
    folder = quantised(name)
    wanted = steps(moestro.load(folder))
    for size in (budgets(folder)[0], budgets(folder)[-2]):
        model = moestro.load(folder, memory=size)
        assert {layer.layout for layer in served(model)} == {f"{name}, read as needed"}
        assert_same(model, wanted, size)


@pytest.mark.parametrize("fused", [False, True])
def test_input_formats_and_unstacked_experts(made, quantised, fused):
    folder = made.folder("qwen3-30b-a3b", fused=fused)
    for dtype in ("float32", "bfloat16"):
        wanted = steps(moestro.load(folder, dtype=dtype))
        assert_same(moestro.load(folder, dtype=dtype, memory=budgets(folder)[1]), wanted, (fused, dtype))
    options = {"input_format": "int8"}
    wanted = steps(moestro.load(quantised("int4-g32"), **options))
    model = moestro.load(quantised("int4-g32"), memory=budgets(quantised("int4-g32"))[0], **options)
    assert_same(model, wanted, options)


def test_in_plain_torch(made):
    """Where PyTorch computes the experts, in every strategy that does not read them all."""
    folder = made.folder("olmoe")
    for strategy, size in zip(("grouped", "selective", "blockwise-4"), budgets(folder), strict=False):
        with moestro.use(implementation="torch", strategy=strategy):
            assert_same(moestro.load(folder, memory=size), steps(moestro.load(folder)), (strategy, size))


def test_many_shards_and_many_tokens_in_generation(made):
    folder = made.folder("gpt-oss-20b", shard_bytes=100_000)
    wanted = moestro.load(folder).generate(PROMPT[:, :50], max_new_tokens=20, do_sample=False)
    model = moestro.load(folder, memory=budgets(folder)[1])
    assert torch.equal(model.generate(PROMPT[:, :50], max_new_tokens=20, do_sample=False), wanted)
    assert expert_memory(model).statistics()["decode"]["hits"] > 0


def test_from_pretrained(made):
    folder = made.folder("qwen3-30b-a3b")
    config = MoestroConfig(memory=budgets(folder)[0])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert_same(model, steps(moestro.load(folder)), "from_pretrained")
    assert expert_memory(model).budget == config.memory
    assert "memory" not in config.to_dict()
    assert MoestroConfig() == MoestroConfig() != MoestroConfig(memory=config.memory) != MoestroConfig("mxfp4")


def test_a_live_run_hits_as_its_own_replay(made):
    folder = made.folder("olmoe")
    for policy, size in itertools.product(ONLINE, budgets(folder)[1::2]):
        model = moestro.load(folder, memory=MemoryBudget(size, policy))
        with recorded(model, "olmoe") as recorder:
            steps(model)
        memory = expert_memory(model)
        replayed = Residents([layer.plan.size for layer in memory.layers], size, POLICIES[policy])
        for visit in recorder.trace().visits:
            replayed.visit(visit.layer, visit.experts, visit.last)
        assert replayed.decode == memory.residents.decode
        assert replayed.prompt == memory.residents.prompt
        assert replayed.total.lookups > 0


def test_no_expert_is_read_that_nobody_picks(made):
    """By the reader's own count, and by the kernel's of bytes that calls of this process read."""
    folder = made.folder("deepseek-v3")
    model = moestro.load(folder, memory="1GB")
    memory, picked = expert_memory(model), set()

    def tell(prepared, arguments, result):
        picked.update((arguments[2].layer.index, e) for e in arguments[1].expert_ids.flatten().tolist())

    assert memory.reader.counts["bytes"] == 0
    before = read_by_process()
    with observed(EXPERT_MLP, tell), torch.no_grad():
        model(torch.tensor([[1]]))
    wanted = sum(memory.layers[layer].plan.size.expert_bytes for layer, _ in picked)
    assert memory.reader.counts["bytes"] == wanted
    assert {key for pool in memory.pools for key in pool.holds if key} == picked
    if before is not None:
        own = memory.reader.counts["bytes_from_files"]
        others = 100_000  # what Python and this test read meanwhile
        assert own <= read_by_process() - before <= own + others
    resident = {layer: len(memory.residents.resident(layer)) for layer in range(len(memory.layers))}
    assert sum(resident.values()) == len(picked) < sum(layer.plan.size.experts for layer in memory.layers)


def read_by_process():
    path = Path("/proc/self/io")
    return int(path.read_text().split("rchar:")[1].split()[0]) if path.exists() else None


def test_lines(made):
    model = moestro.load(made.folder("gpt-oss-20b"), memory="1GB")
    assert memory_line(model).startswith("experts in 156.7 kB of 156.7 kB: 16 slots, policy expected, 4 threads read ")
    steps(model)
    assert "lookups hit" in hits_line(model)
    told = expert_memory(model).statistics()
    assert json.loads(json.dumps(told)) == told
    assert memory_line(moestro.load(made.folder("gpt-oss-20b"))) is None
    assert hits_line(moestro.load(made.folder("gpt-oss-20b"))) is None


def test_explain_says_what_is_there(made):
    model = moestro.load(made.folder("qwen3-30b-a3b"), memory="1GB")
    seen = []
    with observed(EXPERT_MLP, lambda prepared, arguments, result: seen.append(arguments)):
        logits(model, FOUR)
    said = str(moestro.explain(moestro.expert_mlp, *seen[0]))
    assert "lookups hit" in said
    assert "policy expected" in said


@pytest.mark.parametrize("memory", ["1", 1000, 0, -5, "much", 2.5, True, "8XB"])
def test_budgets_that_do_not_work(made, memory):
    folder = made.folder("qwen3-30b-a3b")
    with pytest.raises(InvalidInputError) as caught:
        moestro.load(folder, memory=memory)
    if memory in ("1", 1000) and memory is not True:
        assert f"{budgets(folder)[0]:,}" in str(caught.value)


def test_options_that_there_are_not(made):
    for value in (3, None):
        with pytest.raises(InvalidInputError, match="slots"):
            moestro.load(made.folder("olmoe"), slots=value)
    with pytest.raises(InvalidInputError, match="policy"):
        MemoryBudget(10**9, "random")
    with pytest.raises(InvalidInputError, match="policy"):
        MemoryBudget(10**9, ["lru"])
    for threads in (9, 2.0, True, "4"):
        with pytest.raises(InvalidInputError, match="reading threads"):
            MemoryBudget(10**9, threads=threads)


def test_what_would_have_to_be_converted(made):
    with pytest.raises(UnsupportedError, match="moestro quantize"):
        moestro.load(made.wide(), format="mxfp4", memory="1GB")


def test_what_cannot_be_done_within_a_budget(made, tmp_path):
    folder = made.folder("qwen3-30b-a3b")
    model = moestro.load(folder, memory="1GB")
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
        model(FOUR)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="copy"):
            copied(model)
    with pytest.raises(UnsupportedError, match="load_state_dict"):
        model.load_state_dict(model.state_dict())
    with torch.no_grad():
        for forced in ({"implementation": "reference"}, {"strategy": "all_experts"}):
            with moestro.use(**forced), pytest.raises(UnsupportedError, match="routed to"):
                model(FOUR)
    whole = moestro.load(folder)
    assert torch.equal(logits(model), logits(whole))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(moestro.load(tmp_path / "saved")), logits(whole))


@pytest.mark.parametrize("part", ["", "model", "model.layers.0", "model.layers.0.mlp.experts"])
def test_a_move_is_refused_before_anything_moves(made, part):
    folder = made.folder("qwen3-30b-a3b")
    model, whole = moestro.load(folder, memory="1GB"), moestro.load(folder)
    for move in (lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")):
        with pytest.raises(UnsupportedError, match="the CPU, where its slots are"):
            move(model.get_submodule(part))
        assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.equal(logits(model), logits(whole))


def test_casts_are_those_of_the_whole_model(made):
    folder = made.folder("qwen3-30b-a3b")
    model, whole = moestro.load(folder, memory=budgets(folder)[1]), moestro.load(folder)
    for cast in (lambda m: m.half(), lambda m: m.to(torch.float32), lambda m: m.to("cpu", torch.bfloat16)):
        assert torch.equal(logits(cast(model)), logits(cast(whole)))


@pytest.mark.parametrize("place", [{"": "cuda:0"}, {"model": "cpu", "lm_head": 0}, "cuda"])
def test_other_devices_are_refused_before_a_weight_is_read(made, monkeypatch, place):
    monkeypatch.setattr("moestro.hf.memory.Reader", None)
    monkeypatch.setattr("moestro.hf.loading.find_device", lambda name, operation: torch.device(name))
    load, options = moestro.load, {"memory": "1GB", "device": place}
    if place != "cuda":
        load = AutoModelForCausalLM.from_pretrained
        options = {"quantization_config": MoestroConfig(memory="1GB"), "device_map": place}
    with pytest.raises(UnsupportedError, match=r"memory= and device '(cuda|0).*the CPU"):
        load(made.folder("olmoe"), **options)


def test_a_model_that_was_deleted_gives_its_slots_to_the_next(made, monkeypatch):
    monkeypatch.setattr("moestro.hf.memory.WORTH_COLLECTING", 1)
    folder = made.folder("qwen3-30b-a3b")
    model = moestro.load(folder, memory="1GB")
    gone = weakref.ref(expert_memory(model).reader)
    gc.disable()
    try:
        del model
        moestro.load(folder, memory="1GB")
        assert gone() is None
    finally:
        gc.enable()


def test_a_child_is_refused_while_another_thread_computes(made):
    """And does not wait for a lock that nobody will give back."""
    model = moestro.load(made.folder("qwen3-30b-a3b"), memory="1GB")
    held, done = threading.Event(), threading.Event()

    def hold():
        with expert_memory(model).lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # in place of a hang
        code = 1
        try:
            assert memory_line(model)
            logits(model, FOUR)
        except UnsupportedError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_thousand_tokens_and_four_that_decode(made):
    """A long prompt, and a batch of four that goes on from its own, of a quarter of the experts."""
    folder = made.folder("olmoe")
    whole = moestro.load(folder)
    model = moestro.load(folder, memory=budgets(folder)[1])
    memory = expert_memory(model)
    assert torch.equal(logits(model, PROMPT.repeat(1, 4)[:, :1000]), logits(whole, PROMPT.repeat(1, 4)[:, :1000]))
    four = PROMPT[:, :48].view(4, 12)
    found = [each.generate(four, max_new_tokens=8, do_sample=False) for each in (model, whole)]
    assert torch.equal(*found)
    assert memory.residents.total.loads > 4 * memory.residents.slots  # each slot had several
    check_bookkeeping(memory)


def test_a_folder_of_links_as_a_hub_keeps_it(made, tmp_path):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for number, path in enumerate(made.folder("gpt-oss-20b", shard_bytes=100_000).iterdir()):
        kept = tmp_path / f"blob-{number}"
        shutil.copy(path, kept)
        (folder / path.name).symlink_to(os.path.relpath(kept, folder))
    model = moestro.load(folder, memory=budgets(made.folder("gpt-oss-20b"))[1])
    assert torch.equal(logits(model), logits(moestro.load(folder)))


def test_biases_of_now(made, monkeypatch):
    """Slots have copies of them, also where copying them was broken off."""
    folder = made.folder("gpt-oss-20b")
    whole, model = moestro.load(folder), moestro.load(folder, memory="1GB")
    logits(model)
    for each in (whole, model):
        for name, parameter in each.named_parameters():
            if name.endswith("proj_bias"):
                parameter.data.mul_(3) if "gate_up" in name else setattr(parameter, "data", parameter.data + 1)
    with monkeypatch.context() as patch:
        patch.setattr(slots.SlotPool, "set_bias", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            logits(model)
    assert torch.equal(logits(model), logits(whole))


@pytest.mark.parametrize("how", ["cut", "replaced", "removed"])
def test_a_file_that_is_not_what_it_was(made, tmp_path, how):
    folder = made.copy("qwen3-30b-a3b", tmp_path / "model")
    model, whole = moestro.load(folder, memory="1GB"), moestro.load(made.folder("qwen3-30b-a3b"))
    with torch.no_grad():
        wanted = whole(FOUR).logits
        logits(model, FOUR[:1])
    (file,) = folder.glob("*.safetensors")
    kept = tmp_path / "kept"
    shutil.copy2(file, kept)
    if how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "removed":
        os.remove(file)
    else:
        os.replace(kept, file)
        kept = file
    with pytest.raises(InvalidInputError) as caught:
        logits(model, PROMPT)
    assert str(file) in str(caught.value)
    assert "expert " in str(caught.value)
    memory = expert_memory(model)
    for layer in memory.layers:
        for expert, slot in memory.residents.resident(layer.index).items():
            assert layer.pool.holds[slot] == (layer.index, expert)
    again = moestro.load(made.folder("qwen3-30b-a3b"), memory="1GB")
    assert torch.equal(logits(again, FOUR), wanted)


def test_reads_that_fail_are_made_good(made, monkeypatch):
    """After a failure nothing counts as there that is not, and the next call reads it."""
    folder = made.folder("olmoe")
    wanted, model = steps(moestro.load(folder)), moestro.load(folder, memory=budgets(folder)[1])
    submit, calls = Reader.submit, itertools.count()

    def failing(self, runs, name, urgent=True):
        ticket = submit(self, runs, name, urgent)
        if next(calls) % 7 == 5:
            ticket.wait()
            monkeypatch.setattr(ticket, "wait", lambda: (_ for _ in ()).throw(InvalidInputError("a failure")))
            monkeypatch.setattr(ticket, "settle", lambda: None)
        return ticket

    monkeypatch.setattr(Reader, "submit", failing)
    failures = 0
    for _ in range(6):
        try:
            logits(model, PROMPT)
        except InvalidInputError:
            failures += 1
    assert failures > 0
    monkeypatch.setattr(Reader, "submit", submit)
    assert_same(model, wanted, "after failures")
