"""The experts of one layer as a checkpoint stores them, in place of parameters.

`Recipe` says how the logical experts of a projection are views of named tensors; `ExpertStore` keeps the tensors and
the recipes inside a model. Nothing is computed here: what lies in a file stays there until an expert is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.hf.projections import Projection, Projections
from moestro.hf.residency import Residency
from moestro.types import InputFormat
from moestro.weights import ExpertWeights, check_input_format

STORE = "moestro_store"
"""The name of the sub-module that holds a layer's stored experts."""

SUFFIXES = ("data", "scales", "zeros", "global_scales")
"""What the tensors of a projection in moestro's own checkpoints end with, in the order of PackedTensor."""


@dataclass(frozen=True)
class Part:
    """Names of the tensors that make up some rows of every expert: of each kind one stacked, or one an expert."""

    data: tuple[str, ...]
    scales: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    global_scales: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.data, *self.scales, *self.zeros, *self.global_scales)


@dataclass(frozen=True)
class Recipe:
    """How the experts of one projection are views of a checkpoint's tensors.

    Attributes:
        projection: how dense tensors are laid out; packed ones are [E, N, .] or [N, .] always.
        shape: the logical [E, N, K].
        format: of all of them.
        parts: rows of each expert, one part after the other.
        apart: whether a single tensor is a matrix, and not a stack: for a single expert the names do not tell.
    """

    projection: Projection
    shape: tuple[int, int, int]
    format: WeightFormat
    parts: tuple[Part, ...]
    apart: bool = False

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor it reads."""
        return tuple(name for part in self.parts for name in part.names)

    def names_of(self, expert: int) -> tuple[str, ...]:
        """Every tensor that one expert is read from: its own, or those of all experts."""
        kinds = [k for part in self.parts for k in (part.data, part.scales, part.zeros, part.global_scales) if k]
        return tuple(names[expert] if len(names) > 1 else names[0] for names in kinds)

    def build(self, tensors: Mapping[str, Tensor]) -> StoredExperts:
        """The experts [E, N, K] as views of the tensors; nothing is copied.

        Raises:
            InvalidInputError: a tensor is not of the shape or dtype the format asks for.
        """
        stacked = [self._stack(part, tensors) if self._stacked(part) else None for part in self.parts]
        if len(stacked) == 1 and stacked[0] is not None:
            return stacked[0]
        return SplitTensor(
            tuple(
                tuple(
                    stack[e] if stack is not None else self._matrix(part, tensors, e)
                    for part, stack in zip(self.parts, stacked, strict=True)
                )
                for e in range(self.num_experts)
            )
        )

    def _stacked(self, part: Part) -> bool:
        return len(part.data) == 1 and not self.apart

    def _stack(self, part: Part, tensors: Mapping[str, Tensor]) -> PackedTensor:
        data = tensors[part.data[0]]
        if self.format.is_dense:
            return PackedTensor(self.projection.stack(data, self.num_experts), self.format)
        kinds = (part.scales, part.zeros, part.global_scales)
        rest = [tensors[names[0]] if names else None for names in kinds]
        return PackedTensor(data.flatten(2), self.format, *rest)

    def _matrix(self, part: Part, tensors: Mapping[str, Tensor], e: int) -> PackedTensor:
        if self.format.is_dense:
            return PackedTensor(tensors[part.data[e]], self.format)
        kinds = (part.scales, part.zeros, part.global_scales)
        scales, zeros, global_scales = (tensors[names[e]] if names else None for names in kinds)
        if scales is not None and scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        return PackedTensor(tensors[part.data[e]], self.format, scales, zeros, global_scales)


@dataclass(frozen=True)
class Stored:
    """What a store is made of: the projections it stands for, how to read them, and the full name of its module.

    Attributes:
        path: of the module that holds the store, inside the model.
        projections: of that module.
        gate_up, down: their recipes.
        mapped: whether the tensors are views of files.
    """

    path: str
    projections: Projections
    gate_up: Recipe
    down: Recipe
    mapped: bool = field(default=False)


def _outside(weights: ExpertWeights) -> tuple[Any, ...]:
    """What is not stored with the experts."""
    return weights.gate_up_bias, weights.down_bias, weights.output_norm


class Frozen:
    """Says once a model, when it is to be trained, that its stored experts will not be."""

    def __init__(self) -> None:
        self._said = False

    def say(self, stored_as: str) -> None:
        """Warn, the first time."""
        if self._said:
            return
        self._said = True
        warnings.warn(
            f"[train] got a model whose experts are stored ({stored_as}) and are no parameters: they stay as they are,"
            " everything else trains, and the target_parameters of PEFT match none of them. To train experts too, load"
            " unquantised weights with AutoModelForCausalLM.from_pretrained and call moestro.accelerate on the model.",
            stacklevel=3,
        )


class ExpertStore(nn.Module):
    """Keeps one layer's stored experts: moves with the model, and appears in its state dict as in the checkpoint.

    ``.train()`` warns: no gradient reaches them.

    Casts (``.to(dtype)``, ``.half()``) leave it as it is: the bytes of a format have no other dtype.

    Attributes:
        input_format: how the rows of tokens meet the experts, as in `ExpertWeights`; no state dict has it.
    """

    def __init__(self, stored: Stored, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.stored = stored
        self.residency: Residency | None = None
        self.frozen = Frozen()
        self.input_format: InputFormat = "float"
        self.tensors = {name: tensors[name] for name in (*stored.gate_up.names, *stored.down.names)}
        self._build()

    def _build(self) -> None:
        self._weights: ExpertWeights | None = None
        self.gate_up = self.stored.gate_up.build(self.tensors)
        self.down = self.stored.down.build(self.tensors)

    @property
    def format(self) -> str:
        """The name of the format, or of both."""
        names = dict.fromkeys((self.gate_up.format.name, self.down.format.name))
        return " and ".join(names)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts as stored."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def layout(self) -> str:
        """The format, whether the tensors are views of files, and that of rows where it is not float."""
        rows = "" if self.input_format == "float" else f", {self.input_format} inputs"
        return f"{self.format}, {'memory-mapped' if self.stored.mapped else 'in memory'}{rows}"

    def set_input_format(self, input_format: InputFormat, operation: str) -> None:
        """Have rows of tokens meet the experts in this format from now on.

        Raises:
            InvalidInputError: not an input format.
            UnsupportedError: int8 inputs and experts that are no integers.
        """
        check_input_format(input_format, (self.gate_up.format, self.down.format), operation)
        self.input_format, self._weights = input_format, None

    def weights(self, holder: Any) -> ExpertWeights:
        """The experts as a value, with the biases and the norm that `holder` keeps as its own."""
        if self.residency is not None and self.stored.mapped and not torch.compiler.is_compiling():
            self.residency.turn_to(self.tensors)
        projections = self.stored.projections
        biases = [getattr(holder, f"{projection.name}_bias", None) for projection in projections.both]
        known = self._weights
        norm = getattr(holder, "post_expert_norm", None)
        now = (*biases, norm)
        if known is None or any(a is not b for a, b in zip(now, _outside(known), strict=True)):
            stored = (self.gate_up, self.down, biases[0], biases[1])
            known = ExpertWeights(*stored, projections.activation, norm, self.input_format)
            self._weights = known
        return known

    def train(self, mode: bool = True) -> ExpertStore:
        """As every module; warns once a model that experts are not trained."""
        if mode:
            self.frozen.say(self.format)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertStore:
        for name, tensor in self.tensors.items():
            device = fn(torch.empty(0, dtype=torch.uint8, device=tensor.device)).device
            if device != tensor.device:
                self._take(name, torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        self._build()
        return self

    def _take(self, name: str, tensor: Tensor) -> None:
        """Put a tensor that is no view of a file in the place of one that was."""
        self.tensors[name] = tensor
        self.stored = replace(self.stored, mapped=False)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle: what is stored, once, and not the views of it."""
        views = ("gate_up", "down", "_weights", "residency")
        own = {name: value for name, value in self.__dict__.items() if name not in views}
        # PyTorch does not unpickle dtypes of 8-bit floats.
        tensors = {n: (t.dtype, t.view(torch.uint8) if t.dtype.itemsize == 1 else t) for n, t in self.tensors.items()}
        return own | {"stored": replace(self.stored, mapped=False), "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: tensor.view(dtype) for name, (dtype, tensor) in state["tensors"].items()}
        super().__setstate__(state | {"tensors": tensors, "residency": None})
        self._build()

    def _outer(self, prefix: str) -> str:
        own = f"{self.stored.path}.{STORE}." if self.stored.path else f"{STORE}."
        return prefix.removesuffix(own)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.tensors.items():
            destination[self._outer(prefix) + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        for name, tensor in list(self.tensors.items()):
            key = prefix + name
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != tensor.shape or state_dict[key].dtype != tensor.dtype:
                given = state_dict[key]
                error_msgs.append(
                    f"{key}: {given.dtype} {list(given.shape)}, stored {tensor.dtype} {list(tensor.shape)}"
                )
            elif assign:
                self._take(name, state_dict[key])
            elif self.stored.mapped:
                self._take(name, state_dict[key].clone(memory_format=torch.contiguous_format))
            else:
                tensor.copy_(state_dict[key])
        self._build()

    def extra_repr(self) -> str:
        e, _, k = self.gate_up.shape
        return f"num_experts={e}, hidden_size={k}, {self.layout}"


def find_in_state(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook of a model: hand each store the tensors that stand under the checkpoint's names."""
    for path, module in model.named_modules():
        if isinstance(module, ExpertStore):
            for name in module.tensors:
                if prefix + name in state_dict:
                    state_dict[f"{prefix}{path}.{name}"] = state_dict.pop(prefix + name)


def store_of(holder: nn.Module) -> ExpertStore | None:
    """The stored experts of a module, if it has them in place of parameters."""
    found = holder._modules.get(STORE)
    return found if isinstance(found, ExpertStore) else None
