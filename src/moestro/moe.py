"""The layer: router, experts, shared experts and dispatcher come in as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input
from moestro.experts import Experts
from moestro.ops import gpu
from moestro.ops.inputs import no_rows, no_tensor
from moestro.routing.balancing import BiasUpdate, balanced_bias
from moestro.routing.rewrites import expert_counts
from moestro.routing.routers import TopKRouter
from moestro.tolerances import disagreement
from moestro.types import SWIGLU, Activation, Routing

Rewrite = Callable[[Routing], Routing]
Balance = Callable[[Tensor, Routing], Tensor] | BiasUpdate
"""A loss of a router's logits [T, E] and its routing, a scalar, weight included; or DeepSeek's bias."""


class Dispatcher(Protocol):
    """Moves rows between devices and knows nothing of experts. On one device there is none."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, Any]:
        """x [T, H] and its routing -> rows to compute here, their local routing, and an opaque handle."""
        ...

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """Outputs of the rows computed here -> [T, H] for the tokens that were dispatched."""
        ...


class MoE(nn.Module):
    """x -> router -> routing -> experts(x, routing) [+ shared_experts(x)].

    Args:
        router: maps x [T, H] to a `Routing`: `TopKRouter`, `GroupLimitedRouter`, or any module that does.
        experts: the routed experts.
        shared_experts: a module [T, H] -> [T, H] whose output is added, or None.
        rewrite: applied to every routing, e.g. ``lambda r: keep_confident(r, min_share=0.1)``, or None.
        dispatcher: for experts on several devices, or None.
        balance: what evens out the load of experts in training: a function of the router's logits [T, E] and its
            routing, before `rewrite`, whose scalar `balance_loss(model)` hands on; or a `BiasUpdate`, which
            `update_biases(model)` applies. None for nothing. For a function the router has `logits(x)`, and takes them.

    Raises:
        InvalidInputError: the router's number of experts is not the experts', or it has no logits to balance, or no
            correction bias for a `BiasUpdate`.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Experts,
        shared_experts: nn.Module | None = None,
        rewrite: Rewrite | None = None,
        dispatcher: Dispatcher | None = None,
        balance: Balance | None = None,
    ) -> None:
        super().__init__()
        routed = getattr(router, "num_experts", experts.num_experts)
        if dispatcher is None and rewrite is None and routed != experts.num_experts:
            raise invalid_input(
                "MoE",
                got=f"a router over {routed} experts and {experts.num_experts} experts",
                needs="the same number",
                fix="Build both with one num_experts.",
            )
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts
        self.rewrite = rewrite
        self.dispatcher = dispatcher
        _check_balance(router, balance)
        self.balance = balance
        self._load = _Load()

    def route(self, x: Tensor) -> Routing:
        """The routing of x [T, H], rewrites applied."""
        balanced = self.balance is not None and self.training and torch.is_grad_enabled()
        routing = self._route_balanced(x) if balanced else cast(Routing, self.router(x))
        return routing if self.rewrite is None else self.rewrite(routing)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H].

        Raises:
            InvalidInputError: x is no tensor, its last dimension is not H, or a router's logits are NaN.
        """
        if not isinstance(x, Tensor):
            raise no_tensor("MoE", "x", x)
        experts = self.experts
        shape, hidden_size = x.shape, experts.hidden_size
        if x.dim() < 1 or shape[-1] != hidden_size or not x.is_floating_point():
            raise no_rows("MoE", x, hidden_size)
        x = x if len(shape) == 2 else x.reshape(-1, hidden_size)
        routing = self.route(x)
        routed, shared = self.experts if self.dispatcher is None else self._dispatched, self.shared_experts
        if shared is None:
            y = cast(Tensor, routed(x, routing))
        else:  # which need nothing of each other
            y, z = gpu.beside(x, lambda: cast(Tensor, routed(x, routing)), lambda: cast(Tensor, shared(x)))
            y = y + z
        return y if len(shape) == 2 else y.reshape(shape)

    def _route_balanced(self, x: Tensor) -> Routing:
        """The router's routing, of which is kept what `balance_loss` or `update_biases` will ask for."""
        router: Any = self.router
        balance, load = self.balance, self._load
        if isinstance(balance, BiasUpdate):
            routing: Routing = router(x)
            if not _is_computed_again():
                counts = expert_counts(routing, len(router.correction_bias))
                load.counts = counts if load.counts is None else load.counts + counts
            return routing
        logits = router.logits(x)
        routing = router(x, logits)
        loss = None if balance is None else balance(logits, routing)  # computed again too, as checkpointing wants it
        if not _is_computed_again():
            load.loss = loss
        return routing

    def _dispatched(self, x: Tensor, routing: Routing) -> Tensor:
        """What routed experts on several devices add."""
        assert self.dispatcher is not None
        rows, local, handle = self.dispatcher.dispatch(x, routing)
        return self.dispatcher.combine(self.experts(rows, local), handle)


def _is_computed_again() -> bool:
    """Whether this is a backward pass, in which activation checkpointing calls layers a second time."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _Load:
    """What a layer keeps of its last forward in training; a copy of the layer has none."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.counts: Tensor | None = None

    def __reduce__(self) -> tuple[type[_Load], tuple[()]]:
        return type(self), ()


def balance_loss(model: nn.Module) -> Tensor:
    """The sum of the losses that the layers of a model had in their last forward in training, each taken once.

    ``loss = task_loss + balance_loss(model)``.

    Raises:
        InvalidInputError: no layer has one: none has a function as its `balance`, or none has run since the last call.
    """
    losses: list[Tensor] = []
    for load in (layer._load for layer in _layers(model)):
        if load.loss is not None:
            losses.append(load.loss if not losses else load.loss.to(losses[0].device))
            load.loss = None
    if not losses:
        raise invalid_input(
            "balance_loss",
            got=f"{type(model).__name__}, of which no layer has a loss",
            needs="layers with a function as their balance, and a forward in training mode with gradients",
            fix="Build them with FFN(..., balance=...), and call this once after each forward.",
        )
    return torch.stack(losses).sum()


@torch.no_grad()
def update_biases(model: nn.Module) -> None:
    """Apply `balanced_bias` to the routers of all layers with a `BiasUpdate`: once after each step of the optimizer.

    Rows are those of all forwards in training since the last call, on this rank.

    Raises:
        InvalidInputError: no layer has counted: none has a `BiasUpdate`, or none has run since the last call.
    """
    found = [layer for layer in _layers(model) if layer._load.counts is not None]
    if not found:
        raise invalid_input(
            "update_biases",
            got=f"{type(model).__name__}, of which no layer has counted its rows",
            needs="layers with balance=BiasUpdate(), and a forward in training mode with gradients",
            fix="Build them with FFN(..., balance=BiasUpdate()), and call this once after each step.",
        )
    for layer in found:
        bias, update, counts = cast(Any, layer.router).correction_bias, layer.balance, layer._load.counts
        assert isinstance(update, BiasUpdate)
        assert counts is not None
        bias.copy_(balanced_bias(bias, counts, update.rate))
        layer._load.counts = None


def _layers(model: nn.Module) -> Iterator[MoE]:
    return (module for module in model.modules() if isinstance(module, MoE))


def _check_balance(router: nn.Module, balance: Balance | None) -> None:
    needs_bias = isinstance(balance, BiasUpdate)
    if balance is not None and not needs_bias and (not callable(balance) or isinstance(balance, type)):
        raise invalid_input(
            "MoE",
            got=f"balance={balance!r}",
            needs="a function of logits and routing, or a BiasUpdate(rate)",
            fix="balance=lambda logits, routing: 0.01 * switch_balance_loss(logits.softmax(-1), routing) is one.",
        )
    wanted = "correction_bias" if needs_bias else "logits"
    if balance is None or getattr(router, wanted, None) is not None:
        return
    raise invalid_input(
        "MoE",
        got=f"balance for a {type(router).__name__} without {'a correction bias' if needs_bias else 'logits'}",
        needs="a router with a correction_bias" if needs_bias else "a router with logits(x), whose forward takes them",
        fix="TopKRouter(..., correction_bias=True) has both.",
    )


class FFN(MoE):
    """A routed-expert layer with the signature of a dense FFN: x [..., H] -> [..., H], softmax routing, renormalised.

    Args:
        hidden_size: H.
        intermediate_size: I, of one expert.
        num_experts: E.
        top_k: K, 1 <= K <= E.
        activation: an `Activation` or its name (`Activation.of`): SwiGLU unless said otherwise.
        balance: as for `MoE`; with a `BiasUpdate` the router has a correction bias.
        device, dtype: of the parameters, as torch modules have it.

    Raises:
        InvalidInputError: sizes do not fit, or there is no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int = 8,
        top_k: int = 2,
        activation: Activation | str | None = None,
        balance: Balance | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        chosen = SWIGLU if activation is None else Activation.of(activation, "FFN")
        where: Any = {"device": device, "dtype": dtype}
        biased = isinstance(balance, BiasUpdate)
        router = TopKRouter(hidden_size, num_experts, top_k, "softmax-renormalized", correction_bias=biased, **where)
        experts = Experts(num_experts, hidden_size, intermediate_size, chosen, **where)
        super().__init__(router, experts, balance=balance)

    @classmethod
    def from_dense(cls, dense: nn.Module, num_experts: int, top_k: int, activation: Activation | None = None) -> FFN:
        """Upcycle a dense FFN: every expert starts as a copy of it, so the output starts as the dense one's.

        Args:
            dense: a module with linear layers gate_proj, up_proj and down_proj (gated), or up_proj and down_proj,
                or fc1 and fc2 (plain), without biases.
            num_experts: E.
            top_k: K.
            activation: what the dense module computes between them; default silu for a gated one.

        Raises:
            InvalidInputError: the module has none of these layouts, has biases, is plain without an activation, or
                computes something else with its layers than `activation` says (tried on random tokens).
        """
        gated, first, last = _dense_layers(dense)
        unfit = activation is not None and (activation.gated != gated or activation.interleaved)
        if unfit or any(layer.bias is not None for layer in (*first, last)) or (not gated and activation is None):
            lacking = f"gated: {gated}, with {activation}" if unfit else "with biases, or plain without an activation"
            raise invalid_input(
                "FFN.from_dense",
                got=f"{type(dense).__name__} {lacking}",
                needs="linear layers without biases, and an activation of the same kind (for a plain FFN a named one)",
                fix='Pass e.g. Activation(kind="gelu", gated=False), and drop the biases.',
            )
        matrix = torch.cat([layer.weight for layer in first])
        ffn = cls(matrix.shape[1], last.weight.shape[1], num_experts, top_k, activation)
        ffn = ffn.to(dtype=matrix.dtype, device=matrix.device)
        with torch.no_grad():
            for parameter, copied in zip(ffn.experts.parameters(), (matrix, last.weight), strict=True):
                parameter.copy_(copied.expand_as(parameter))
            _check_upcycled(dense, ffn)
        return ffn


def _check_upcycled(dense: nn.Module, ffn: FFN) -> None:
    if type(dense).forward is nn.Module.forward:
        return  # a bare container of layers computes nothing to compare with
    weight = next(ffn.experts.parameters())
    x = torch.randn(8, ffn.experts.hidden_size, generator=torch.Generator().manual_seed(0)).to(weight)
    training = dense.training
    found = disagreement(ffn(x), dense.eval()(x))
    dense.train(training)
    if found is not None:
        raise invalid_input(
            "FFN.from_dense",
            got=f"{type(dense).__name__}, which does not compute {ffn.experts.activation}: {found}",
            needs="the activation that the dense module applies",
            fix='Pass it, e.g. activation=Activation("gelu-tanh").',
        )


def _dense_layers(dense: nn.Module) -> tuple[bool, list[nn.Linear], nn.Linear]:
    for names in (("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"), ("fc1", "fc2")):
        layers = [getattr(dense, name, None) for name in names]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            linears = cast(list[nn.Linear], layers)
            return len(names) == 3, linears[:-1], linears[-1]
    raise invalid_input(
        "FFN.from_dense",
        got=f"{type(dense).__name__} with {', '.join(n for n, _ in dense.named_children()) or 'no children'}",
        needs="linear layers gate_proj, up_proj, down_proj, or up_proj, down_proj, or fc1, fc2",
        fix="Build moestro.FFN(...) and copy the weights yourself.",
    )
