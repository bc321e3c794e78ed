"""The experts implementation: what runs where Transformers calls an experts module.

`plan_of` reads the module's flags once and checks them against its shapes and its own gate; `serve` looks at the
parameters of the moment, so that it follows ``.to()``, ``load_state_dict`` and training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from moestro.errors import UnsupportedError, unsupported
from moestro.formats import dense
from moestro.formats.dense import DENSE_FORMATS
from moestro.hf.activation import recognise
from moestro.hf.layout import K_CONTIGUOUS, SETTLING, make_k_contiguous, separate_state
from moestro.hf.store import Projection, Projections, stored_weights
from moestro.memory import library
from moestro.memory.library import TracedWeights
from moestro.memory.waves import MemoryWeights
from moestro.moe import Dispatcher
from moestro.ops.expert_mlp import run
from moestro.types import Activation, Routing
from moestro.weights import Built, ExpertWeights

PLAN = "_moestro_plan"
_DTYPES = tuple(f.storage for f in DENSE_FORMATS)
_IS_CONSTANT = torch.__version__ >= "2.13"
"""Whether a tracer takes what a function returns of a module for constant; with PyTorch 2.11 it fails."""


@dataclass(frozen=True)
class Flags:
    """How a module stores its experts, in the words of Transformers' decorator (which keeps them as attributes)."""

    gated: bool = True
    transposed: bool = False
    biased: bool = False
    output_norm: bool = False

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"


@dataclass(frozen=True)
class Plan:
    """How one module is served. A copied or unpickled one makes its own plan, which may hold a method of the module."""

    activation: Activation
    flags: Flags = field(default_factory=Flags)
    layout: str = K_CONTIGUOUS
    built: dict[tuple[Any, ...], Built] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class RefusedError(UnsupportedError):
    """A module that cannot be served; `reason` is the clause that a sentence about its model can take in."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


_RUN_EAGER = "The model still runs with Transformers' own code (experts_implementation='eager')."


def refuse(module: nn.Module, got: str, needs: str, fix: str = _RUN_EAGER) -> RefusedError:
    """The error for a module that cannot be served: it names the class, and nothing has been changed yet."""
    error = unsupported(type(module).__name__, got=got, needs=needs, fix=fix)
    return RefusedError(str(error), f"it has {got}, where moestro needs {needs}")


def check_dense(module: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Raise `UnsupportedError` unless every tensor is an ordinary floating-point one."""
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise refuse(module, f"weights of {tensor.dtype}", f"one of {', '.join(map(str, _DTYPES))}")
        if type(tensor) not in (nn.Parameter, Tensor):
            traced = isinstance(tensor, FakeTensor)
            needs = "one forward pass, or moestro.accelerate, before it is traced" if traced else "ordinary tensors"
            raise refuse(module, f"weights stored as {type(tensor).__name__}", needs)


def flags_of(module: nn.Module) -> Flags:
    """The decorator's flags as the module carries them; a version that lacks one means its default."""
    return Flags(
        getattr(module, "has_gate", True),
        getattr(module, "is_transposed", False),
        getattr(module, "has_bias", False),
        getattr(module, "has_post_expert_norm", False),
    )


def inspect(module: nn.Module, flags: Flags | None = None) -> Plan:
    """Read an experts module without changing it; refuse parameters that are not what the flags say, or not dense."""
    flags = flags or flags_of(module)
    needed = [flags.up_name, "down_proj"]
    needed += [f"{name}_bias" for name in needed] if flags.biased else []
    missing = [name for name in needed if not isinstance(getattr(module, name, None), Tensor)]
    unknown = [name for name, _ in module.named_parameters(recurse=False) if name not in needed]
    if missing or unknown:
        got = f"no parameter {', '.join(missing)}" if missing else f"an unknown parameter {', '.join(unknown)}"
        raise refuse(module, got, f"exactly {', '.join(needed)}")
    check_dense(module, [getattr(module, name) for name in needed])
    plan = Plan(activation_of(module, flags.gated), flags)
    try:
        expert_weights(module, plan)
    except ValueError as error:
        raise refuse(module, f"shapes its flags do not explain ({error})", "the layout they name") from error
    return plan


def plan_of(module: nn.Module, flags: Flags | None = None) -> Plan:
    """The plan of a module, made at the first call; transposed parameters are then rearranged in place."""
    plan: Plan | None = module.__dict__.get(PLAN)
    if plan is not None:
        return plan
    flags = flags or flags_of(module)
    found: Plan = (_constant_plan if _IS_CONSTANT and torch.compiler.is_compiling() else _settled)(module, flags)
    return found


@torch.compiler.disable(reason="call the model once before it is compiled as one graph, or use PyTorch 2.13")  # type: ignore[untyped-decorator]
def _settled(module: nn.Module, flags: Flags) -> Plan:
    with SETTLING:
        plan = module.__dict__.get(PLAN)
        return settle(module, inspect(module, flags)) if plan is None else plan


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_plan(module: nn.Module, flags: Flags) -> Plan:
    return inspect(module, flags)


def settle(module: nn.Module, plan: Plan) -> Plan:
    """Rearrange transposed parameters where that is safe, and remember the plan in the module."""
    if plan.flags.transposed:
        separate_state(module)
        plan.built.clear()  # views of the parameters
        with SETTLING:
            layouts = [make_k_contiguous(getattr(module, name)) for name in (plan.flags.up_name, "down_proj")]
        plan = replace(plan, layout=next((text for text in layouts if text != K_CONTIGUOUS), K_CONTIGUOUS))
    module.__dict__[PLAN] = plan
    return plan


def expert_weights(module: Any, plan: Plan) -> ExpertWeights:
    """The module's parameters of this moment as `ExpertWeights`; nothing is copied."""
    flags = plan.flags
    sides = (getattr(module, flags.up_name), module.down_proj)
    first, second = (getattr(module, f"{flags.up_name}_bias"), module.down_proj_bias) if flags.biased else (None, None)
    norm = module.post_expert_norm if flags.output_norm else None

    def make() -> ExpertWeights:
        gate_up, down = (dense(t.transpose(1, 2) if flags.transposed else t) for t in sides)
        return ExpertWeights(gate_up, down, first, second, plan.activation, norm)

    if torch.compiler.is_compiling() or (flags.transposed and torch.is_grad_enabled()):
        return anew(plan, make)  # views are to be recorded with each call
    return kept(plan, (norm, *(t.data_ptr() for t in sides)), (*sides, first, second), make)


def anew(plan: Plan, make: Callable[[], ExpertWeights]) -> ExpertWeights:
    """The weights of one call that is recorded; what the plan keeps goes: it would keep replaced parameters alive."""
    if not torch.compiler.is_compiling():
        plan.built.clear()
    return make()


def kept(
    plan: Plan, key: tuple[Any, ...], parameters: Sequence[Tensor | None], make: Callable[[], ExpertWeights]
) -> ExpertWeights:
    """The weights that the plan keeps under this key, made anew if they were of other parameters."""
    known = plan.built.get(key)
    if known is None or not known.is_current(parameters):
        known = Built(make(), parameters)
        plan.built.clear()
        plan.built[key] = known
    return known.weights


def projections(module: nn.Module, plan: Plan) -> Projections:
    """The parameters that hold the experts of a module of the interface."""
    name, transposed = plan.flags.up_name, plan.flags.transposed
    both = Projection(name, (name,), transposed), Projection("down_proj", ("down_proj",), transposed)
    return Projections("", both, int(module.get_parameter("down_proj").shape[0]), plan.activation)


def serve(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, strategy: str = "auto"
) -> Tensor:
    """What `experts_implementation="moestro"` runs in place of the module's forward.

    Args:
        module: an experts module of the interface.
        hidden_states: [..., H].
        top_k_index: integer [T, K]; an id at or beyond the number of experts is an empty slot, which is how expert
            parallelism names experts of other ranks and some routers name "no expert".
        top_k_weights: [T, K].
        strategy: as for `moestro.expert_mlp`.

    Returns:
        [..., H] in the dtype of hidden_states.

    Raises:
        UnsupportedError: the module's weights cannot be served (quantised, sharded, or of an unknown layout).
    """
    return apply(hidden_states, top_k_index, top_k_weights, weights_of(module), strategy)


def weights_of(module: nn.Module) -> ExpertWeights | TracedWeights:
    """The experts of a module of the interface as they are now; errors as of `serve`."""
    return stored_weights(module) or expert_weights(module, plan_of(module))


def apply(
    hidden_states: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    weights: ExpertWeights | TracedWeights,
    strategy: str,
) -> Tensor:
    """`expert_mlp` for a model's own router: ids beyond the experts are empty slots, dtypes are aligned."""
    return run_rows(hidden_states, model_routing(expert_ids, routing_weights), weights, strategy)


def model_routing(expert_ids: Tensor, routing_weights: Tensor) -> Routing:
    """A model's two tensors [T, K] as a `Routing`, whose ids may lie beyond the experts."""
    return Routing(expert_ids, routing_weights if routing_weights.dtype == torch.float64 else routing_weights.float())


class Spread(str):
    """A strategy, and the dispatcher that brings rows to the ranks which have their experts."""

    dispatcher: Dispatcher

    def __new__(cls, strategy: str, dispatcher: Dispatcher) -> Spread:
        made = super().__new__(cls, strategy)
        made.dispatcher = dispatcher
        return made

    def __getnewargs__(self) -> tuple[str, Dispatcher]:  # type: ignore[override]
        """What a copy is made of."""
        return str(self), self.dispatcher

    def run(self, rows: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        """The primitive on the rows and the routing that come to this rank's experts."""
        here, local, handle = self.dispatcher.dispatch(rows, routing)
        return self.dispatcher.combine(run(here, local, weights, str(self)), handle)


def run_rows(hidden_states: Tensor, routing: Routing, weights: ExpertWeights | TracedWeights, strategy: str) -> Tensor:
    """Run the primitive on hidden_states [..., H] in the wider dtype of the two, and return that of hidden_states."""
    rows = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
    form = weights.format if isinstance(weights, TracedWeights) else weights.gate_up.format
    if form.is_dense and form.storage != rows.dtype:
        rows = rows.to(torch.promote_types(rows.dtype, form.storage))
    if isinstance(weights, MemoryWeights | TracedWeights):
        y = library.call(rows, routing, weights, strategy)
    elif isinstance(strategy, Spread):
        y = strategy.run(rows, routing, weights)
    else:
        y = run(rows, routing, weights, strategy)
    if y.dtype != hidden_states.dtype:
        y = y.to(hidden_states.dtype)
    return y if y.dim() == hidden_states.dim() else y.view(hidden_states.shape)


def activation_of(module: nn.Module, gated: bool) -> Activation:
    """What the module computes between its two matmuls: data where that is what it does, else its own function."""
    act: Callable[[Tensor], Tensor] = getattr(module, "act_fn", torch.nn.functional.silu)
    function = (getattr(module, "_apply_gate", None) or partial(glu, act)) if gated else act
    if isinstance(act, nn.Module) and act.state_dict():
        return Activation(kind="custom", gated=gated, function=function)  # its numbers may change, or be trained
    limits_and_slopes = tuple(v for v in vars(module).values() if isinstance(v, float))
    return recognise(function, gated, limits_and_slopes)


def glu(act: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """``act(gate) * up`` for z [..., 2 * I] that holds gate and then up."""
    gate, up = z.chunk(2, dim=-1)
    return act(gate) * up
