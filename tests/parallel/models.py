"""What ranks compute with whole models in the tests: logits, and what they keep of the experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import moestro
from hf.checkpoints import IDS
from moestro.hf import MoestroConfig
from moestro.hf.serving import served, stored_in
from moestro.ops.dispatch import observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.parallel import make_mesh


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
