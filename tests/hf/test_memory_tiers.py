"""Models in two tiers with slots, here in two memories of a CPU: the bits of the whole model, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import moestro
from hf.checkpoints import FAMILIES, logits
from hf.test_memory import PROMPT, assert_same, budgets, steps
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf import MoestroConfig
from moestro.hf.memory import expert_memory, hits_line, memory_line, placed
from moestro.hf.recording import recorded
from moestro.hf.store import ExpertStore
from moestro.memory import POLICIES, DeviceMemory, MemoryBudget, Residents, library, slots
from moestro.memory.prefetch import Gain
from moestro.memory.waves import MemoryWeights
from moestro.ops.dispatch import candidates, observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.types import Routing
from reading_ahead import Always
from tolerances import assert_close


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch):
    monkeypatch.setattr(slots, "POISON", True)


def two(device_bytes, host_bytes, on_miss="copy", policy="expected"):
    return MemoryBudget(host_bytes, policy, device_memory=DeviceMemory(device_bytes, on_miss, "cpu"))


def check(memory):
    """Neither tier takes more than its part, and the host is asked for what the device lacks."""
    host = memory.below.memory
    for tier in (memory, host):
        assert tier.slot_bytes <= tier.nbytes
        for layer in tier.layers:
            for expert, slot in tier.residents.resident(layer.index).items():
                assert layer.pool.holds[slot] == (layer.index, expert)
    assert memory.residents.total.loads == host.residents.total.lookups
    assert host.residents.total.loads == memory.reader.counts["requests"]


@pytest.mark.parametrize("like", FAMILIES)
def test_bits_are_those_of_the_whole_model(made, like):
    folder = made.folder(like)
    wanted = steps(moestro.load(folder))
    least, more, *_, half, whole = budgets(folder)
    for device, host, gain in ((least, least, None), (more, whole, Always()), (half, more, Gain())):
        model = moestro.load(folder, memory=two(device, host, "copy" if gain is None else "auto"))
        expert_memory(model).on_miss = gain
        assert_same(model, wanted, (device, host, gain))
        check(expert_memory(model))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_by_other_implementations(made, implementation):
    """Triton's kernels in waves, in its interpreter; they have the bits of one call by the same plan."""
    folder = made.folder("qwen3-30b-a3b")
    prompt, token = PROMPT[:, :40] if implementation == "torch" else PROMPT[:, :4], torch.tensor([[3]])
    least, more = budgets(folder)[:2]
    with moestro.use(implementation=implementation):
        whole = moestro.load(folder)
        for budget in (two(least, least), more):
            model = moestro.load(folder, memory=budget)
            for ids in (prompt, token):
                assert torch.equal(logits(model, ids), logits(whole, ids)), (budget, ids.shape)


def test_experts_computed_where_they_are_beside_triton(made):
    """A mix of a device's kernels and of the CPU's engine: close, and not the same bits."""
    folder = made.folder("qwen3-30b-a3b")
    least = budgets(folder)[0]
    with moestro.use(implementation="triton"):
        whole, model = moestro.load(folder), moestro.load(folder, memory=two(least, least, "compute"))
        for token in (3, 17, 5):
            ids = torch.tensor([[token]])
            assert_close(logits(model, ids), logits(whole, ids))
    assert expert_memory(model).statistics()["on_miss"] == {"asked": "compute", "computes": True, "gain": None}


@pytest.mark.parametrize("on_miss", ["compute", "auto"])
def test_biases_of_experts_computed_where_they_are(made, on_miss):
    """They go with an expert wherever it is computed, also after they were written to."""
    folder = made.folder("gpt-oss-20b")
    least, more, *_, whole = budgets(folder)
    for device, host in ((least, least), (more, whole)):
        expected, model = moestro.load(folder), moestro.load(folder, memory=two(device, host, on_miss))
        for step in range(24):
            ids = torch.tensor([[step * 11 % 60]])
            assert torch.equal(logits(model, ids), logits(expected, ids)), (device, host, step)
            if step % 5 == 4:
                named = [*expected.named_parameters(), *model.named_parameters()]
                with torch.no_grad():
                    for bias in (p for name, p in named if name.endswith("experts.down_proj_bias")):
                        bias.add_(1)


def test_time_that_computing_below_waits_is_told(made):
    folder = made.folder("olmoe")
    least = budgets(folder)[0]
    model = moestro.load(folder, memory=two(least, least, "compute"))
    memory = expert_memory(model)
    for token in range(8):
        logits(model, torch.tensor([[token]]))
    assert memory.seconds_waiting >= memory.below.memory.seconds_waiting > 0


@pytest.fixture
def planned_on_a_device(monkeypatch):
    """Calls are prepared as where nothing but slots is on the device that computes."""
    monkeypatch.setattr(MemoryWeights, "planned_for", lambda self, x: self.layer.slots_of(self))


@pytest.mark.usefixtures("planned_on_a_device")
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_calls_are_planned_as_for_the_whole_model(made, implementation):
    """However few slots there are, and however many."""
    folder, walks = made.folder("qwen3-30b-a3b"), {}
    least, *_, all_of_it = budgets(folder)
    with moestro.use(implementation=implementation):
        whole = moestro.load(folder)
        for budget in (None, two(least, least), two(all_of_it, all_of_it)):
            model = whole if budget is None else moestro.load(folder, memory=budget)
            for tokens in (3,) if implementation == "triton" else (1, 3, 9, 17, 40):
                seen = []
                with observed(EXPERT_MLP, lambda prepared, *_, seen=seen: seen.append((prepared.walk, prepared.why))):
                    found = logits(model, PROMPT[:, :tokens])
                assert walks.setdefault(tokens, (seen, found))[0] == seen, (budget, tokens)
                assert torch.equal(walks[tokens][1], found), (budget, tokens)


@pytest.mark.usefixtures("planned_on_a_device")
@pytest.mark.parametrize("implementation", [None, "torch", "triton"])
def test_ids_beyond_the_experts_are_no_slots(made, implementation):
    """Not even where every id is, and there are slots of such numbers."""
    folder = made.folder("olmoe")
    whole = budgets(folder)[-1]
    model = moestro.load(folder, memory=two(whole, whole))
    logits(model, PROMPT[:, :40])
    seen = []
    with observed(EXPERT_MLP, lambda prepared, arguments, result: seen.append(arguments)):
        logits(model, PROMPT[:, :3])
    x, routing, weights, _ = seen[0]
    assert weights.layer.pool.num_slots > weights.num_experts
    beyond = Routing(torch.full_like(routing.expert_ids, weights.num_experts), routing.routing_weights)
    with torch.no_grad(), moestro.use(implementation=implementation):
        assert not library.call(x, beyond, weights, "auto").any()


def test_explain_asks_about_the_slots_of_a_device(made):
    folder = made.folder("olmoe")
    least = budgets(folder)[0]
    model = moestro.load(folder, memory=two(least, least))
    seen = []
    with observed(EXPERT_MLP, lambda prepared, arguments, result: seen.append(arguments)):
        logits(model, PROMPT[:, :3])
    x, routing, weights, strategy = seen[0]
    own, told = weights.layer.slots_of(weights), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryWeights, "planned_for", lambda self, x: own)
        module = sys.modules["moestro.explain"]
        patch.setattr(module, "candidates", lambda _, *given: told.append(given) or candidates(_, *given))
        said = moestro.explain(moestro.expert_mlp, x, routing, weights, strategy)
    assert told[0][2] is own
    assert said.chosen
    assert "lookups" in str(said)


def test_where_no_engine_computes_below(made):
    """In plain PyTorch rows of two processors are not put together: `auto` copies, and `compute` is refused."""
    folder = made.folder("olmoe")
    with moestro.use(implementation="torch"):
        wanted = steps(moestro.load(folder))
        model = moestro.load(folder, memory=two(*budgets(folder)[:2], "auto"))
        expert_memory(model).on_miss = Always()
        assert_same(model, wanted, "torch")
        model = moestro.load(folder, memory=two(*budgets(folder)[:2], "compute"))
        refused(UnsupportedError, 'on_miss="compute"', logits, model, torch.tensor([[3]]))


def test_a_live_run_hits_as_its_own_replay(made):
    folder = made.folder("olmoe")
    device = budgets(folder)[2]
    model = moestro.load(folder, memory=two(device, budgets(folder)[3], policy="lfu"))
    with recorded(model, "olmoe") as recorder:
        steps(model)
    memory = expert_memory(model)
    replayed = Residents([layer.plan.size for layer in memory.layers], device, POLICIES["lfu"])
    for visit in recorder.trace().visits:
        replayed.visit(visit.layer, visit.experts, visit.last)
    assert (replayed.decode, replayed.prompt) == (memory.residents.decode, memory.residents.prompt)


def test_what_is_said(made):
    folder = made.folder("olmoe")
    least, *_, whole = budgets(folder)
    model = moestro.load(folder, memory=two(least, whole))
    steps(model)
    steps(model)
    assert "others were in host memory" in hits_line(model)
    assert "of the host's memory" in memory_line(model)
    told = expert_memory(model).statistics()
    host = told["host"]
    assert (told["device"], told["budget_bytes"], host["budget_bytes"]) == ("cpu", least, whole)
    assert host["prompt"]["hit_rate"] > 0
    assert host["host"] is None
    assert told["bytes_from_files"] < told["prompt"]["read_bytes"]


def test_in_a_graph(made):
    folder = made.folder("qwen3-30b-a3b")
    wanted = logits(moestro.load(folder), PROMPT[:, :40])
    model = moestro.load(folder, memory=two(*budgets(folder)[:2]))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(PROMPT[:, :40]).logits, wanted)


def refused(error, match, call, *given, **options):
    with pytest.raises(error, match=match):
        call(*given, **options)


def test_what_is_refused(made):
    folder = made.folder("olmoe")
    least, *_, whole = budgets(folder)
    refused(UnsupportedError, "device_memory= on the CPU", moestro.load, folder, memory=whole, device_memory=least)
    refused(UnsupportedError, "on the CPU", moestro.load, folder, memory=whole, device_memory="1MB", device="cpu")
    refused(InvalidInputError, "device_memory='1MB' without memory", moestro.load, folder, device_memory="1MB")
    refused(InvalidInputError, "budget of -1", moestro.load, folder, memory=whole, device_memory=-1)
    refused(InvalidInputError, "on_miss='guess'", DeviceMemory, 1, "guess")
    assert DeviceMemory.of("12GB", on_miss="compute") == DeviceMemory(12_000_000_000, "compute")
    refused(InvalidInputError, f"{least:,} bytes", moestro.load, folder, memory=two(least - 1, whole))
    refused(InvalidInputError, f"{least:,} bytes", moestro.load, folder, memory=two(whole, least - 1))
    both = {"prefetch": True, "device_memory": DeviceMemory(1)}
    refused(UnsupportedError, "prefetch and device_memory", MemoryBudget, 1, **both)
    missing = MemoryBudget(whole, device_memory=DeviceMemory(whole, device="cuda:77"))
    refused(InvalidInputError, "cuda:77", moestro.load, folder, memory=missing)
    from_pretrained = AutoModelForCausalLM.from_pretrained
    refused(InvalidInputError, "cuda:77", from_pretrained, folder, quantization_config=MoestroConfig(memory=missing))
    config = MoestroConfig(memory=whole, device_memory=least)
    refused(UnsupportedError, "of no device", AutoModelForCausalLM.from_pretrained, folder, quantization_config=config)
    model = moestro.load(folder, memory=two(least, whole))
    refused(UnsupportedError, "where its slots are", model.to, "meta")
    expert_memory(model).device = torch.device("meta")  # as of a GPU, which a model is not taken from either
    store = next(module for module in model.modules() if isinstance(module, ExpertStore))
    refused(UnsupportedError, "meta, where its slots are", store.check_stays, lambda tensor: torch.empty(0))
    refused(UnsupportedError, "device_memory names", placed, two(least, whole), torch.device("meta"))


def test_an_engine_that_takes_no_such_rows(made):
    """`compute` is refused where the host's engine does not take the rows; `auto` copies."""
    folder = made.folder("olmoe")
    least = budgets(folder)[0]
    token = torch.tensor([[3]])
    with moestro.use(implementation="triton"):
        wanted = logits(moestro.load(folder), token)
        for on_miss in ("compute", "auto"):
            model = moestro.load(folder, memory=two(least, least, on_miss))
            memory = expert_memory(model)
            if on_miss == "auto":
                memory.on_miss.on = True
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("moestro.memory.waves._engine", lambda *_: None)
                if on_miss == "compute":
                    refused(UnsupportedError, "on_miss", logits, model, token)
                else:
                    assert torch.equal(logits(model, token), wanted)
