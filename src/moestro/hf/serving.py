"""`accelerate`: serve the experts of a model in hand, in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from moestro.checkpoint.scheme import METHOD
from moestro.errors import UnsupportedError, unsupported
from moestro.hf import experts
from moestro.hf.activation import describe
from moestro.hf.beside import serve_beside
from moestro.hf.dense import check_choice, check_projections
from moestro.hf.experts import PLAN, Plan, RefusedError, Spread
from moestro.hf.families import ADAPTERS, LEFT, REFUSED
from moestro.hf.families.base import INTERFACE, Adapter
from moestro.hf.low_precision import FP8, MXFP4
from moestro.hf.sharding import is_cut, local_parameters, put_bias, recipe_of
from moestro.hf.store import STORE, ExpertStore
from moestro.moe import Dispatcher
from moestro.ops.expert_mlp.tuning import parse_strategy
from moestro.parallel.rebalance import CutLayer
from moestro.types import InputFormat
from moestro.weights import ExpertWeights, check_input_format

Model = TypeVar("Model", bound=nn.Module)

_ADAPTERS = {**ADAPTERS, FP8.module: FP8, MXFP4.module: MXFP4}

_SHARED = re.compile(r"SharedExperts?(MLP)?$")
_EXPERTS = re.compile(r"experts?$", re.IGNORECASE)
_ROUTER = re.compile(r"(gate|router|switch|gating)$")
_RUNS = "Nothing was changed; the model runs as before."
_ELSEWHERE = (
    "Load the checkpoint with Transformers' own class of the architecture (without trust_remote_code), which stacks its"
    " experts; or write an adapter, as docs/how-to/add-an-architecture.md shows. Nothing was changed; the model runs as"
    " before."
)
_ROUTED = re.compile(r"(Experts|MoE|Moe|SparseMLP|MoeBlock|MoEBlock|MoELayer)$")


@dataclass(frozen=True)
class Served:
    """One module of a model that moestro serves.

    Attributes:
        path: its name inside the model ("model.layers.0.mlp.experts").
        module: its class.
        family: "experts interface", or the family whose adapter serves it.
        activation: the function between the matmuls ("custom" when it runs the module's own code).
        layout: "K-contiguous", or "strided (reason)"; of stored experts "FORMAT, memory-mapped" or "FORMAT, in memory",
            with ", int8 inputs" where integers are multiplied.
        strategy: the strategy it was asked for.
        stored: whether its experts are kept as a checkpoint stores them, and not as parameters.
    """

    path: str
    module: str
    family: str
    activation: str
    layout: str
    strategy: str
    stored: bool = False


def accelerate(
    model: Model, strategy: str = "auto", input_format: InputFormat | None = None, *, projections: str = "torch"
) -> Model:
    """Run the expert layers of a Transformers model with moestro, in place.

    Parameters keep their names, shapes, dtypes and values, so training, ``state_dict`` and ``save_pretrained`` go on as
    before; only the forward of each expert layer changes, and transposed weights are rearranged inside their own
    storage. Attention with sinks that would run eagerly runs fused on a CPU. A second call changes nothing, or strategy
    and input_format. Nothing is changed when an error is raised.

    Args:
        model: any module that contains experts of Transformers' interface, or of Llama 4, DBRX, JetMoE,
            LongCat-Flash, Switch Transformers, NLLB-MoE, Doge or Step-3.7.
        strategy: as for `moestro.expert_mlp`: "auto" chooses by shape; "blockwise-64" also sets the block size.
        input_format, projections: as for `moestro.load`; None leaves the input format, which is "float" at first.

    Returns:
        The same model.

    Raises:
        InvalidInputError: an unknown strategy, input_format or projections; a format that cannot store the shape or
            the values of a linear module.
        UnsupportedError: a dense model, or one with an expert layer that cannot be served or with experts in a list of
            modules; it names the layer. An input_format of int8 where experts are not stored as integers. A format of
            projections where there is no linear module.
    """
    parse_strategy(strategy, "accelerate")
    check_choice(projections, "accelerate")
    found = find(model)
    check_projections(model, projections, "accelerate")
    fresh = [layer for layer in found if stored_in(layer.module) is None]
    stores = [store for layer in found if (store := stored_in(layer.module)) is not None]
    forms = [form for store in stores for form in (store.gate_up.format, store.down.format)]
    check_input_format(input_format or "float", forms, "accelerate")
    for layer in fresh:
        if input_format not in (None, "float"):
            raise unsupported(
                "accelerate",
                got=f"{input_format} inputs for {layer.path or 'the model'}, whose experts are parameters",
                needs="experts stored as integers: int8, int4, mxfp4, nvfp4 or fp4",
                fix='Load the model with moestro.load(path, format="int4-g32", input_format="int8").',
            )
        reads_past_calls = layer.adapter.settle is not experts.settle  # which bring offloaded weights to memory
        if reads_past_calls and any(t.is_meta for t in layer.module.parameters()):
            reason = "weights on the meta device (offloaded, or not loaded yet), where moestro needs them in memory"
            raise _refusal(model, layer.path, type(layer.module).__name__, reason)
    _serve_layers(found, fresh, strategy)
    for store in stores:
        store.set_input_format(input_format or store.input_format, "accelerate")
    serve_beside(model, projections)
    return model


def _serve_layers(found: list[Found], fresh: list[Found], strategy: str) -> None:
    """Have moestro run in every layer found; `fresh` are those whose experts are parameters."""
    cut = [layer for layer in fresh if is_cut(layer.module)]
    if cut and strategy != "auto":
        raise unsupported(
            "accelerate",
            got=f"strategy={strategy!r} for {cut[0].path}, whose experts Transformers has cut over processes",
            needs='strategy="auto"',
            fix="Leave it out; moestro.use(strategy=...) names one for all calls of a block.",
        )
    for layer in fresh:
        if layer not in cut:
            layer.adapter.settle(layer.module, layer.plan)
    for layer in found:
        if layer in cut:  # what Transformers wrapped around the experts stays; inside it, this is what runs
            layer.module.config._experts_implementation = METHOD  # type: ignore[union-attr]
        else:
            replace_forward(layer, strategy)


@dataclass(frozen=True)
class Found:
    """An expert layer of a model that can be served."""

    path: str
    module: nn.Module
    adapter: Adapter
    plan: Plan


def find(model: nn.Module) -> list[Found]:
    """Every expert layer of `model`; an UnsupportedError where there is none, or names one that cannot be served."""
    found: list[Found] = []
    inner: set[nn.Module] = set()  # of modules that were dealt with as a whole
    for path, module in model.named_modules():
        name, adapter = type(module).__name__, adapter_of(module)
        if module in inner:
            continue
        if adapter is not None or (name in LEFT and _of_transformers(module)):
            inner.update(module.modules())
        elif name in REFUSED:
            raise _refusal(model, path, name, REFUSED[name])
        elif routes(name) and all(adapter_of(m) is None for m in module.modules()):
            reason = "moestro has no adapter for it, and Transformers' experts interface misses it"
            raise _refusal(model, path, name, reason, _ELSEWHERE)
        if adapter is not None:
            try:
                found.append(Found(path, module, adapter, _plan(module, adapter)))
            except UnsupportedError as error:
                reason = error.reason if isinstance(error, RefusedError) else str(error)
                raise _refusal(model, path, name, reason) from error
    if not found:
        _check_lists(model)
        raise unsupported(
            "accelerate",
            got=f"{type(model).__name__}, a dense model: no layer of it routes tokens to experts",
            needs="a Mixture-of-Experts model",
            fix="Run the model as it is; there is nothing here to serve.",
        )
    return found


def served(model: nn.Module) -> list[Served]:
    """The expert layers of `model` that moestro serves, and how; an empty list if there are none."""
    return [
        Served(
            path,
            type(module).__name__,
            adapter.family,
            describe(plan.activation),
            plan.layout,
            strategy,
            stored_in(module) is not None,
        )
        for path, module in model.named_modules()
        if (adapter := adapter_of(module)) is not None
        and (strategy := _strategy_of(module, adapter)) is not None
        and (plan := _plan(module, adapter, module.__dict__.get(PLAN))) is not None
    ]


def num_experts_of(module: nn.Module) -> int | None:
    """Of a served module; None of a family whose weights are in no one place."""
    store, adapter = stored_in(module), adapter_of(module)
    if store is not None:
        return store.stored.projections.num_experts
    if adapter is None or adapter.projections is None:
        return None
    return adapter.projections(module, _plan(module, adapter, module.__dict__.get(PLAN))).num_experts


def adapter_of(module: nn.Module) -> Adapter | None:
    """What serves this module, or None if it holds no routed experts that are known."""
    adapter = _ADAPTERS.get(type(module).__name__) if _of_transformers(module) else None
    if adapter is None and {"has_gate", "is_transposed"} <= vars(module).keys():
        return INTERFACE
    return adapter


def _check_lists(model: nn.Module) -> None:
    """Refuse a model that has experts after all, in lists of modules whose classes nothing here knows."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        above, _, name = path.rpartition(".")
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        routed = _EXPERTS.search(name) or any(_ROUTER.match(beside) for beside, _ in modules[above].named_children())
        each = list(module.children())
        kinds = {type(expert) for expert in each}
        if routed and len(each) > 1 and len(kinds) == 1 and sum(p.dim() == 2 for p in each[0].parameters()) > 1:
            reason = f"experts as {len(each)} modules of {type(each[0]).__name__}, which moestro does not recognise"
            raise _refusal(model, path, type(module).__name__, reason, _ELSEWHERE)


def stored_in(module: nn.Module) -> ExpertStore | None:
    """The stored experts of a served module, if a checkpoint's tensors took the place of its parameters."""
    return next((m for m in module.modules() if isinstance(m, ExpertStore)), None)


def routes(name: str) -> bool:
    """Whether a module class of this name, in Transformers' way of naming, holds routed experts."""
    return bool(_ROUTED.search(name)) and not _SHARED.search(name)


def _of_transformers(module: nn.Module) -> bool:
    """Whether its class is Transformers' own: code that came with a checkpoint may use the same names."""
    return type(module).__module__.startswith("transformers.")


def _plan(module: nn.Module, adapter: Adapter, remembered: Plan | None = None) -> Plan:
    """How a module is served: as it is stored, or as its adapter finds unless that is remembered."""
    store = stored_in(module)
    if store is not None:
        return Plan(store.stored.projections.activation, layout=store.layout)
    if adapter is INTERFACE and is_cut(module):
        with local_parameters(module):
            return remembered or adapter.inspect(module)
    return remembered or adapter.inspect(module)


def _refusal(model: nn.Module, path: str, name: str, reason: str, fix: str = _RUNS) -> UnsupportedError:
    return unsupported(
        "accelerate",
        got=f"{type(model).__name__}, whose {path or 'root'} is a {name}: {reason}",
        needs="expert layers that can all be served",
        fix=fix,
    )


def replace_forward(layer: Found, strategy: str) -> None:
    """Have moestro run where the module of an expert layer is called; experts that are cut stay so."""
    module = layer.module
    before = _own_forward(module)
    if before is not None and isinstance(before.keywords.get("strategy"), Spread) and not isinstance(strategy, Spread):
        strategy = Spread(strategy, before.keywords["strategy"].dispatcher)
    forward: Callable[..., Any] = partial(layer.adapter.forward, module, strategy=strategy)
    # Where the accelerate library wrapped the module, its wrapper keeps running around this forward.
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    module.__dict__[name] = forward
    module.__dict__["_replicate_for_data_parallel"] = partial(_replicate, module)


@dataclass(frozen=True)
class CutExperts:
    """A served module whose stored experts are cut over ranks, as `moestro.parallel.rebalance` moves them."""

    module: nn.Module
    holder: nn.Module

    @property
    def weights(self) -> ExpertWeights:
        found = self._now.weights(self.holder)
        assert isinstance(found, ExpertWeights)  # experts that are cut are within no memory budget
        return found

    @property
    def dispatcher(self) -> Dispatcher:
        found = _spread_of(self.module)
        assert found is not None
        return found.dispatcher

    @property
    def _now(self) -> ExpertStore:
        found = self.holder.get_submodule(STORE)
        assert isinstance(found, ExpertStore)
        return found

    def put_weights(self, weights: ExpertWeights) -> None:
        """A store of these, in memory, in the place of the one before."""
        before = self._now
        sides = zip(before.stored.recipes, (weights.gate_up, weights.down), strict=True)
        (gate_up, first), (down, second) = (recipe_of(recipe.target, stored) for recipe, stored in sides)
        made = ExpertStore(replace(before.stored, recipes=(gate_up, down)), first | second)
        made.cut, made.warns, made.input_format = before.cut, before.warns, before.input_format
        made.train(before.training)
        for projection, bias in zip(
            before.stored.projections.both, (weights.gate_up_bias, weights.down_bias), strict=True
        ):
            put_bias(self.holder, projection.name, bias)
        self.holder.add_module(STORE, made)

    def put_dispatcher(self, dispatcher: Dispatcher) -> None:
        own = _own_forward(self.module)
        assert own is not None
        name = next(key for key in ("_old_forward", "forward") if self.module.__dict__.get(key) is own)
        others = {key: value for key, value in own.keywords.items() if key != "strategy"}
        strategy = Spread(str(own.keywords["strategy"]), dispatcher)
        self.module.__dict__[name] = partial(own.func, *own.args, **others, strategy=strategy)


def cut_experts(model: nn.Module) -> dict[str, CutLayer]:
    """The served modules of a model whose stored experts are cut over ranks, by their names."""
    found: dict[str, CutLayer] = {}
    for path, module in model.named_modules():
        spread, holder = _spread_of(module), next((m for m in module.modules() if STORE in m._modules), None)
        if spread is not None and holder is not None:
            found[path] = CutExperts(module, holder)
    return found


def _spread_of(module: nn.Module) -> Spread | None:
    own = _own_forward(module)
    strategy = None if own is None else own.keywords.get("strategy")
    return strategy if isinstance(strategy, Spread) else None


def _replicate(module: Any) -> Any:
    """What nn.DataParallel asks for: a replica whose forward reads the replica's own parameters."""
    replica = type(module)._replicate_for_data_parallel(module)
    for name, own in vars(module).items():
        if isinstance(own, partial) and own.args and own.args[0] is module:
            replica.__dict__[name] = partial(own.func, replica, **own.keywords)
    plan: Plan | None = vars(module).get(PLAN)
    if plan is not None and plan.activation.function is not None:
        replica.__dict__[PLAN] = None  # the function may be a method of the original
    return replica


def _own_forward(module: nn.Module) -> partial[Any] | None:
    """What replaced the forward of a module."""
    found = (module.__dict__.get(name) for name in ("_old_forward", "forward"))
    return next((own for own in found if isinstance(own, partial)), None)


def _strategy_of(module: nn.Module, adapter: Adapter) -> str | None:
    """The strategy of a served module; None if it runs its own forward."""
    own = _own_forward(module)
    if own is not None and own.func is adapter.forward:
        return str(own.keywords["strategy"])
    config = getattr(module, "config", None)
    if adapter in (INTERFACE, FP8) and getattr(config, "_experts_implementation", None) == METHOD:
        return "auto"
    return None
