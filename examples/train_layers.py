"""What makes `train_bundled.py` fast on a CPU: experts, attention, the loss and the optimizer of a small MoE.

Each is registered with, or called beside, Transformers' own Qwen3-MoE, whose weights and names stay what they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROUND = 128  # an expert's rows are filled up to a multiple: oneDNN compiles a kernel for each number of rows it sees
WEIGHT_DECAY, CLIP, MOMENTUM = 0.1, 1.0, 0.95


@torch.compile(dynamic=False)
def swiglu(h: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)


@torch.compile(dynamic=False)
def swiglu_backward(h: Tensor, grad: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    sigmoid, grad = torch.sigmoid(gate), grad.float()
    return torch.cat([grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], -1).to(h.dtype)


@torch.compile(dynamic=False)
def sum_slots(rows: Tensor, row_of_pair: Tensor, weights: Tensor) -> Tensor:
    """Row t of the result: the rows of token t's pairs, each times its weight."""
    picked = rows[row_of_pair].view(*weights.shape, -1).float()
    return (picked * weights[:, :, None]).sum(1).to(rows.dtype)


@torch.compile(dynamic=False)
def spread(grad: Tensor, pair_of_row: Tensor, weights: Tensor) -> Tensor:
    """The gradient of each row; rows that only fill up have none."""
    pair = pair_of_row.clamp(min=0)
    scale = weights.flatten()[pair] * (pair_of_row >= 0)
    return (grad[pair // weights.shape[1]].float() * scale[:, None]).to(grad.dtype)


@torch.compile(dynamic=False)
def weight_gradient(rows: Tensor, row_of_pair: Tensor, grad: Tensor, slots: int) -> Tensor:
    picked = rows[row_of_pair].view(len(grad), slots, -1).float()
    return (picked * grad.float()[:, None]).sum(-1)


def rows_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair's row, every row's pair (-1: fills up) and where each expert's rows end."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    filled = (counts + ROUND - 1) // ROUND * ROUND
    ends = filled.cumsum(0)
    shift = (ends - filled) - (counts.cumsum(0) - counts)
    rows = torch.arange(len(flat)) + shift[flat[order]]
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = rows
    pair_of_row = torch.full((len(flat) + ROUND * num_experts,), -1)
    pair_of_row[rows] = order
    return row_of_pair, pair_of_row, ends


def rows_to_fill(like: Tensor, width: int, ends: Tensor) -> Tensor:
    """Rows that products are written into; those that belong to no expert are zero."""
    rows = like.new_empty(len(like), width)
    rows[ends[-1] :] = 0
    return rows


def parts(ends: Tensor) -> list[tuple[int, slice]]:
    bounds = [0, *ends.tolist()]
    return [(e, slice(bounds[e], bounds[e + 1])) for e in range(len(ends)) if bounds[e + 1] > bounds[e]]


@torch.library.custom_op("train_bundled::experts", mutates_args=())
def experts_op(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The routed experts, and what their gradient needs."""
    row_of_pair, pair_of_row, ends = rows_by_expert(ids, len(gate_up))
    rows = x.index_select(0, pair_of_row.clamp(min=0) // ids.shape[1])
    h, y = rows_to_fill(rows, gate_up.shape[1], ends), rows_to_fill(rows, x.shape[1], ends)
    for expert, part in parts(ends):
        torch.mm(rows[part], gate_up[expert].T, out=h[part])
    activated = swiglu(h)
    for expert, part in parts(ends):
        torch.mm(activated[part], down[expert].T, out=y[part])
    return sum_slots(y, row_of_pair, weights), rows, h, y, row_of_pair, pair_of_row, ends


@experts_op.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    rows = ids.numel() + ROUND * len(gate_up)
    kept = x.new_empty(rows, x.shape[1]), x.new_empty(rows, gate_up.shape[1]), x.new_empty(rows, x.shape[1])
    return torch.empty_like(x), *kept, ids.new_empty(ids.numel()), ids.new_empty(rows), ids.new_empty(len(gate_up))


@torch.library.custom_op("train_bundled::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor, kept: list[Tensor], weights: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, h, y, row_of_pair, pair_of_row, ends = kept
    grad_weights = weight_gradient(y, row_of_pair, grad, weights.shape[1])
    grad_y, activated = spread(grad, pair_of_row, weights), swiglu(h)
    grad_activated, grad_rows = rows_to_fill(rows, down.shape[2], ends), rows_to_fill(rows, rows.shape[1], ends)
    grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    for expert, part in parts(ends):
        torch.mm(grad_y[part], down[expert], out=grad_activated[part])
        torch.mm(grad_y[part].T, activated[part], out=grad_down[expert])
    grad_h = swiglu_backward(h, grad_activated)
    for expert, part in parts(ends):
        torch.mm(grad_h[part], gate_up[expert], out=grad_rows[part])
        torch.mm(grad_h[part].T, rows[part], out=grad_gate_up[expert])
    grad_x = sum_slots(grad_rows, row_of_pair, torch.ones_like(weights))
    return grad_x, grad_weights, grad_gate_up, grad_down


@experts_backward.register_fake
def _(grad: Tensor, kept: list[Tensor], weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    return torch.empty_like(grad), torch.empty_like(weights), torch.empty_like(gate_up), torch.empty_like(down)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:], *inputs[2:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    *kept, weights, gate_up, down = ctx.saved_tensors
    of_x, of_weights, *of_experts = torch.ops.train_bundled.experts_backward(
        grad.contiguous(), kept, weights, gate_up, down
    )
    return of_x, None, of_weights, *of_experts


experts_op.register_autograd(_backward, setup_context=_keep)


def sorted_experts(self: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Transformers' interface of experts: each expert multiplies its own rows, forward and backward."""
    return torch.ops.train_bundled.experts(x, chosen, weights.float(), self.gate_up_proj, self.down_proj)[0]


def causal_blocks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Transformers' interface of attention: queries a block at a time against the keys up to its end."""
    batch, heads, length, width = query.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    query = query.view(batch, kv_heads, group, length, width)
    size = math.ceil(length / 4)
    out = []
    for start in range(0, length, size):
        end = min(start + size, length)
        q = query[:, :, :, start:end].reshape(batch * kv_heads, group * (end - start), width)
        k, v = (t[:, :, :end].reshape(batch * kv_heads, end, width) for t in (key, value))
        scores = torch.bmm(q, k.transpose(1, 2)).float() * scaling
        later = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        shares = scores.masked_fill(later.repeat(group, 1), -math.inf).softmax(-1).to(q.dtype)
        out.append(torch.bmm(shares, v).view(batch, heads, end - start, width))
    return torch.cat(out, 2).transpose(1, 2), None


@torch.compile(dynamic=False)
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over rows, and its gradient in the logits' dtype."""
    shifted = logits.float() - logits.amax(-1, keepdim=True).float()
    exponentials = shifted.exp()
    sums = exponentials.sum(-1, keepdim=True)
    hit = torch.arange(logits.shape[1]) == targets[:, None]
    loss = (sums.log()[:, 0] - torch.where(hit, shifted, 0.0).sum(-1)).sum()
    return loss, (exponentials / sums - hit.float()).to(logits.dtype)


class HeadLoss(torch.autograd.Function):
    """The output layer and the cross-entropy with their gradients, a thousand positions at a time: the logits stay
    in the processor's cache, which makes a whole training step about a sixth faster."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        losses = []
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        for part in torch.arange(len(hidden)).split(1024):
            rows = slice(part[0], part[-1] + 1)
            loss, gradient = cross_entropy(hidden[rows] @ head.T, targets[rows])
            losses.append(loss)
            torch.mm(gradient, head, out=grad_hidden[rows])
            grad_head += gradient.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden / len(hidden), (grad_head / len(hidden)).to(head.dtype))
        return torch.stack(losses).sum() / len(hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * upstream[0], grad_head * upstream[0], None


@torch.compile(dynamic=False)
def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrices [..., m, n], m at most n, with orthonormal rows, nearly: five steps of a Newton-Schulz
    iteration with the coefficients of Keller Jordan's Muon."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.float()


class MuonAdamW:
    """Float32 copies of bfloat16 weights, so that small updates add up instead of being rounded away. Matrices
    between hidden states get Muon's update, scaled to the size of AdamW's; embeddings, routers and norms get AdamW's.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self.weights = [weight for _, weight in named]
        self.masters = [weight.detach().float() for weight in self.weights]
        self.momenta = {i: torch.zeros_like(m) for i, m in enumerate(self.masters) if self.is_matrix(named[i][0])}
        self.shapes: dict[tuple[int, int], list[int]] = {}
        for i in self.momenta:
            self.shapes.setdefault(tuple(self.as_wide(self.masters[i], named[i][0]).shape[-2:]), []).append(i)
        self.names = [name for name, _ in named]
        rest = [m for i, m in enumerate(self.masters) if i not in self.momenta]
        wide = {"params": [m for m in rest if m.ndim > 1], "weight_decay": WEIGHT_DECAY}
        norms = {"params": [m for m in rest if m.ndim == 1], "weight_decay": 0.0}
        self.adam = torch.optim.AdamW([wide, norms], lr=0.0, betas=(0.9, 0.95), fused=True)

    @staticmethod
    def is_matrix(name: str) -> bool:
        return "_proj" in name

    @staticmethod
    def as_wide(value: Tensor, name: str) -> Tensor:
        """Matrices [..., m, n] with m at most n; the two halves of gate_up apart."""
        if name.endswith("gate_up_proj"):
            value = value.view(len(value), 2, -1, value.shape[-1])
        return value.mT if value.shape[-2] > value.shape[-1] else value

    @torch.no_grad()
    def step(self, lr: float, muon_lr: float) -> float:
        """One update; returns the gradient's norm before clipping."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for shape, group in self.shapes.items():
            self._muon(shape, group, muon_lr)
        self.publish()
        return float(norm)

    def _muon(self, shape: tuple[int, int], group: list[int], lr: float) -> None:
        directions = []
        for i in group:
            gradient = self.masters[i].grad
            self.momenta[i].lerp_(gradient, 1 - MOMENTUM)
            directions.append(self.as_wide(gradient.lerp(self.momenta[i], MOMENTUM), self.names[i]))
        flat = torch.cat([d.reshape(-1, *shape) for d in directions])
        updates = orthogonal(flat).split([d.numel() // (shape[0] * shape[1]) for d in directions])
        scale = 0.2 * math.sqrt(shape[1])
        for i, update in zip(group, updates, strict=True):
            target = self.as_wide(self.masters[i], self.names[i])
            target.mul_(1 - lr * WEIGHT_DECAY).add_(update.view_as(target), alpha=-lr * scale)

    @torch.no_grad()
    def publish(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)

    def state(self) -> dict[str, Any]:
        return {"masters": self.masters, "momenta": self.momenta, "adam": self.adam.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        for i, saved in state["momenta"].items():
            self.momenta[i].copy_(saved)
        self.adam.load_state_dict(state["adam"])
        self.publish()
