"""What ranks compute with whole models in the tests: logits, and what they keep of the experts."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import moestro
from hf.checkpoints import IDS
from moestro.hf import MoestroConfig
from moestro.hf.generate import Sampling, generate
from moestro.hf.serving import served, stored_in
from moestro.hf.sharding import batch_of
from moestro.hf.text_model import load_text_model
from moestro.ops.dispatch import observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.parallel import Peers, make_mesh


def quiet():
    torch.use_deterministic_algorithms(False)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@torch.no_grad()
def answer(model):
    stores = [store for module in model.modules() if (store := stored_in(module)) is not None]
    tensors = {id(t): t for store in stores for t in store.tensors.values()}
    seen = []
    with observed(EXPERT_MLP, lambda *call: seen.append(call[0].implementation)):
        logits = model(IDS).logits
    return logits, sum(t.nbytes for t in tensors.values()), len(seen)


def loaded(folder, ep, tp, form=None):
    """Logits and bytes of experts by `load` on a mesh; without one where ep and tp are 0."""
    quiet()
    mesh = make_mesh(dist.get_world_size() // (ep * tp), ep, tp) if ep else None
    return answer(moestro.load(folder, form, dtype="float32", device=mesh))


def of_transformers(folder, sizes, implementation=None, form=None, served=True):
    """Logits and bytes of experts by Transformers' own way."""
    quiet()
    own = {} if form is None else {"quantization_config": MoestroConfig(form)}
    if served:
        own["experts_implementation"] = "moestro"
    how = DistributedConfig(**sizes, **({} if implementation is None else {"ep_implementation": implementation}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=how, **own)
    if served == "afterwards":
        moestro.accelerate(model)
    return answer(model.eval())


def saved(folder, target):
    quiet()
    return moestro.load(folder, device=make_mesh(1, dist.get_world_size(), 1)).save_pretrained(target)


def accelerated_otherwise(folder):
    """A second call of accelerate, with a strategy, on a model whose experts are cut."""
    quiet()
    model = moestro.accelerate(moestro.load(folder, dtype="float32", device=make_mesh(1, 2, 1)), "blockwise-8")
    return (*answer(model), {layer.strategy for layer in served(model)})


def with_strategy(folder):
    quiet()
    how = DistributedConfig(tp_size=2, ep_size=2)
    return moestro.accelerate(AutoModelForCausalLM.from_pretrained(folder, distributed_config=how), "grouped")


@torch.no_grad()
def other_tokens(folder):
    """The first call of a model, with another prompt of the same size on rank 1."""
    quiet()
    model = moestro.load(folder, dtype="float32", device=make_mesh(1, dist.get_world_size(), 1))
    return model(IDS.flip(1) if dist.get_rank() == 1 else IDS).logits.shape


@torch.no_grad()
def passed_otherwise(folder):
    """The first call of a model, whose tokens rank 1 passes by name and the others by position."""
    quiet()
    model = moestro.load(folder, dtype="float32", device=make_mesh(1, dist.get_world_size(), 1))
    own = {"input_ids": IDS, "attention_mask": None} if dist.get_rank() == 1 else {}
    return (model(**own) if own else model(IDS)).logits


@torch.no_grad()
def copied(folder):
    """Agreements after two calls of a copy and two of the original, where rank 0 alone has labels."""
    quiet()
    model = moestro.load(folder, dtype="float32", device=make_mesh(1, dist.get_world_size(), 1))
    peers, found, counts, logits = batch_of(model), [], [], []
    copy = deepcopy(model)
    assert batch_of(copy) is peers
    run = Peers.agree
    try:
        Peers.agree = lambda self, said, *given: (found.append(given[0]), run(self, said, *given))[1]
        for each in (copy, copy, model, model):
            logits.append(each(IDS, labels=IDS if dist.get_rank() == 0 else None).logits)
            counts.append(found.count("first call"))
    finally:
        Peers.agree = run
    return counts, all(torch.equal(logits[0], each) for each in logits)


def generated(prompts, seeded):
    """What the bundled model samples on each rank, whose own random numbers differ."""
    quiet()
    model = load_text_model(None, "float32", make_mesh(1, dist.get_world_size(), 1))
    torch.manual_seed(dist.get_rank())
    sampling = Sampling(max_new_tokens=12, do_sample=True, temperature=2.0, seed=3 if seeded else None)
    return [generate(model, prompts[dist.get_rank()], sampling).text for _ in range(2)]


@contextmanager
def watched(tell):
    """Tells of the group of every collective inside."""
    run = Peers._run
    Peers._run = lambda self, *given: (tell(self), run(self, *given))[1]
    try:
        yield
    finally:
        Peers._run = run


def timeouts(folder):
    """Of the groups that dispatchers of a loaded model use, by `load` and by Transformers' own way."""
    quiet()
    loaded, called = set(), set()
    model = moestro.load(folder, dtype="float32", device=make_mesh(1, 2, 1, timeout=88.0))
    with watched(lambda peers: loaded.add(peers.timeout)):
        answer(model)
    how = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="moestro_all_to_all")
    own = {"experts_implementation": "moestro", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, **own)
    with watched(lambda peers: called.add(peers.timeout)):
        answer(model.eval())
    return loaded, called


def peak(folder, form):
    """Bytes that loading slices took at most, those that stay, and those of the experts in one process."""
    quiet()
    status = Path("/proc/self/status")

    def read(name):
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(name))

    mesh = make_mesh(1, 1, 2)
    moestro.load(folder, form, device=mesh)  # what Python and Transformers take for themselves
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    model = moestro.load(folder, form, device=mesh)
    stores = [store for module in model.modules() if (store := stored_in(module)) is not None]
    kept = sum(t.nbytes for store in stores for t in store.tensors.values())
    rest = sum(p.nbytes for p in model.parameters())
    return read("VmHWM") - before, kept, rest


def layer_names(folder):
    """The error of a model whose ranks disagree in a layer of dense experts."""
    quiet()
    make_mesh(1, 2, 1, timeout=4.0)
    how = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="moestro_all_gather")
    own = {"experts_implementation": "moestro", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, **own).eval()

    def fewer(module, given):
        return tuple(t[1:] for t in given)

    if dist.get_rank() == 1:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(fewer)
    return answer(model)


def stored_projections(folder, loading):
    """Linear modules in 8 bits of a model that Transformers cuts, as it is loaded or afterwards."""
    quiet()
    how = DistributedConfig(tp_size=2)
    own = {"quantization_config": MoestroConfig(projections="int8")} if loading else {}
    return moestro.accelerate(
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, **own), projections="int8"
    )
