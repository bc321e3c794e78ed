"""The experts of one layer as a checkpoint stores them, in place of parameters.

`Recipe` says how the logical experts of a projection are views of named tensors; `ExpertStore` keeps the tensors and
the recipes inside a model. Nothing is computed here: what lies in a file stays there until an expert is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.checkpoint import Checkpoint
from moestro.errors import MoestroError, unsupported
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.hf.residency import Residency
from moestro.memory import library
from moestro.memory.experts import LayerMemory
from moestro.memory.library import TracedWeights
from moestro.memory.waves import MemoryWeights
from moestro.types import Activation, InputFormat
from moestro.weights import ExpertWeights, OutputNorm, check_input_format

STORE = "moestro_store"
"""The name of the sub-module that holds a layer's stored experts."""

KINDS = ("data", "scales", "zeros", "global_scales")
"""The tensors of a `PackedTensor`; moestro's own checkpoints name those of a projection so, after its name."""

Part = Mapping[str, tuple[str, ...]]
"""Names of the tensors that make up some rows of every expert, by kind: of each kind one stacked, or one an expert."""


@dataclass(frozen=True)
class Projection:
    """One projection of a module's experts, which Transformers keeps in one parameter over all of them, or in two.

    Attributes:
        name: what its stored tensors are called after ("gate_up_proj").
        parameters: the parameters of the module whose rows, one after the other, make up each expert's [N, K].
        transposed: whether an expert's matrix is stored [K, N].
        flat: whether a parameter holds the experts' matrices one below the other, not in a dimension of their own.
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False
    flat: bool = False

    def target(self, path: str) -> str:
        """Its full name in the model, for a module at `path`."""
        return f"{path}.{self.name}" if path else self.name

    def stack(self, tensor: Tensor, num_experts: int) -> Tensor:
        """A tensor as stored -> [E, n, K], a view."""
        stack = tensor.view(num_experts, -1, tensor.shape[-1]) if self.flat else tensor
        return stack.transpose(1, 2) if self.transposed else stack


@dataclass(frozen=True)
class Projections:
    """Both projections of one layer's experts, gate_up and down, and what stands between them as they are stored.

    Their parameters are those of `holder`, a path inside the module that is served ("" for itself).
    """

    holder: str
    both: tuple[Projection, Projection]
    num_experts: int
    activation: Activation

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that a store takes the place of."""
        return tuple(name for projection in self.both for name in projection.parameters)


Find = Callable[[Any, Any], Projections]
"""Reads the projections of a served module from the module and its plan."""


@dataclass(frozen=True)
class Recipe:
    """How the experts of one projection are views of a checkpoint's tensors.

    Attributes:
        target: the projection's full name in the model.
        shape: the logical [E, N, K].
        format: of all of them.
        parts: rows of each expert, one part after the other.
        projection: how dense tensors are laid out, if not as [E, N, K] or [N, K].
        unstacked: whether a single tensor is a matrix, and not a stack: for a single expert the names do not tell.
    """

    target: str
    shape: tuple[int, int, int]
    format: WeightFormat
    parts: tuple[Part, ...]
    projection: Projection | None = None
    unstacked: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor it reads."""
        return tuple(name for part in self.parts for names in part.values() for name in names)

    def names_of(self, expert: int) -> tuple[str, ...]:
        """Every tensor that one expert is read from: its own, or those of all experts."""
        kinds = [names for part in self.parts for names in part.values()]
        return tuple(names[expert] if len(names) > 1 else names[0] for names in kinds)

    def build(self, tensors: Mapping[str, Tensor]) -> StoredExperts:
        """The experts [E, N, K] as views of the tensors, whose shapes and dtypes are checked; nothing is copied."""
        experts = range(self.shape[0])
        parts: list[PackedTensor | list[PackedTensor]] = []
        for part in self.parts:
            if len(part["data"]) == 1 and not self.unstacked:
                parts.append(self._stack({kind: tensors[name] for kind, (name,) in part.items()}))
            else:
                parts.append([self._matrix({kind: tensors[n[e]] for kind, n in part.items()}) for e in experts])
        first = parts[0]
        if len(parts) == 1 and isinstance(first, PackedTensor):
            return first
        return SplitTensor(tuple(tuple(part[e] for part in parts) for e in experts))

    def read(self, checkpoint: Checkpoint) -> StoredExperts:
        """The experts of a checkpoint, whose tensors are mapped."""
        return self.build({name: checkpoint.tensor(name) for name in self.names})

    def _stack(self, tensors: dict[str, Tensor]) -> PackedTensor:
        data, projection = tensors.pop("data"), self.projection if self.format.is_dense else None
        data = data.flatten(2) if projection is None else projection.stack(data, self.shape[0])
        return PackedTensor(data, self.format, **tensors)

    def _matrix(self, tensors: dict[str, Tensor]) -> PackedTensor:
        if "scales" in tensors and tensors["scales"].dim() < 2:
            tensors["scales"] = tensors["scales"].reshape(-1, 1)
        return PackedTensor(format=self.format, **tensors)


@dataclass(frozen=True)
class Stored:
    """What a store is made of: recipes of gate_up and of down, in place of the parameters of the module at `path`."""

    path: str
    projections: Projections
    recipes: tuple[Recipe, Recipe]


def not_within_memory(operation: str, needs: str) -> MoestroError:
    """The error for what a model within a memory budget does not do."""
    fix = "Load the model without memory=."
    return unsupported(operation, got="a model whose experts are within a memory budget", needs=needs, fix=fix)


class ExpertStore(nn.Module):
    """Keeps one layer's stored experts: moves with the model, and appears in its state dict as in the checkpoint.

    Casts (``.to(dtype)``, ``.half()``) leave it as it is: the bytes of a format have no other dtype.

    Attributes:
        mapped: whether the tensors are views of files.
        input_format: how the rows of tokens meet the experts, as in `ExpertWeights`; no state dict has it.
        memory: what has the experts that are in memory, of a model within a memory budget; None where files are mapped.
        cut: whether other processes have the rest of the experts: then what is here cannot be saved as a checkpoint.
        warns: whether ``.train()`` says, once, that no gradient reaches the experts: of one store in a model.
    """

    def __init__(self, stored: Stored, tensors: Mapping[str, Tensor], mapped: bool = False) -> None:
        super().__init__()
        self.stored, self.mapped = stored, mapped
        self.residency: Residency | None = None
        self.memory: LayerMemory | None = None
        self._handle: Tensor | None = None
        self.warns = self.cut = False
        self.input_format: InputFormat = "float"
        self.tensors = {name: tensors[name] for recipe in stored.recipes for name in recipe.names}
        self._build()

    def _build(self) -> None:
        self._weights: ExpertWeights | None = None
        self._beside = (*(f"{each.name}_bias" for each in self.stored.projections.both), "post_expert_norm")
        self.gate_up, self.down = (recipe.build(self.tensors) for recipe in self.stored.recipes)

    @property
    def layout(self) -> str:
        """The format or both, whether the tensors are views of files, and that of rows where it is not float."""
        names = " and ".join(dict.fromkeys(recipe.format.name for recipe in self.stored.recipes))
        rows = "" if self.input_format == "float" else f", {self.input_format} inputs"
        where = "memory-mapped" if self.mapped else "in memory"
        return f"{names}, {where if self.memory is None else 'read as needed'}{rows}"

    def set_input_format(self, input_format: InputFormat, operation: str) -> None:
        """Have rows of tokens meet the experts in this format from now on; errors as of `check_input_format`."""
        check_input_format(input_format, (self.gate_up.format, self.down.format), operation)
        self.input_format, self._weights = input_format, None

    def keep_within(self, memory: LayerMemory) -> None:
        """Leave the experts in their files, and have those of a budget's slots from here."""
        self.memory, self._handle = memory, library.register(self)

    def weights(self, holder: Any) -> ExpertWeights | TracedWeights:
        """The experts as a value, with the biases and the norm that `holder` keeps as its own."""
        compiling = torch.compiler.is_compiling()
        first, second, norm = (_of(holder, name) for name in self._beside)
        if self._handle is not None:
            if compiling:
                return TracedWeights(self._handle, self.gate_up.format, first, second, norm)
            return self.weights_with(first, second, norm)
        if self.residency is not None and self.mapped and not compiling:
            self.residency.turn_to(self.tensors)
        known = self._weights
        if (
            known is None
            or known.gate_up_bias is not first
            or known.down_bias is not second
            or known.output_norm is not norm
        ):
            self._weights = known = self._made(first, second, norm)
        return known

    def weights_with(self, first: Tensor | None, second: Tensor | None, norm: OutputNorm | None) -> MemoryWeights:
        """The experts within a budget, with these biases of gate_up and of down and this norm."""
        known = self._weights
        if (
            not isinstance(known, MemoryWeights)
            or known.output_norm is not norm
            or not _is_same(known.gate_up_bias, first)
            or not _is_same(known.down_bias, second)
        ):
            assert self.memory is not None  # others are not asked
            made = self._made(first, second, norm)
            self._weights = known = MemoryWeights.of(made, self.memory, self._handle)
        return known

    def _made(self, first: Tensor | None, second: Tensor | None, norm: OutputNorm | None) -> ExpertWeights:
        stored = self.gate_up, self.down, first, second
        return ExpertWeights(*stored, self.stored.projections.activation, norm, self.input_format)

    def train(self, mode: bool = True) -> ExpertStore:
        """As every module; warns once a model that experts are not trained."""
        if mode and self.warns:
            self.warns = False
            warnings.warn(
                f"[train] got a model whose experts are stored ({self.layout}) and are no parameters: they stay as"
                " they are, everything else trains, and the target_parameters of PEFT match none of them. To train"
                " experts too, load unquantised weights with AutoModelForCausalLM.from_pretrained and call"
                " moestro.accelerate on the model.",
                stacklevel=2,
            )
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertStore:
        if self.memory is not None:
            self.check_stays(fn)
            return self
        for name, tensor in self.tensors.items():
            device = fn(torch.empty(0, dtype=torch.uint8, device=tensor.device)).device
            if device != tensor.device:
                self._take(name, torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        self._build()
        return self

    def check_stays(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse what `Module._apply` is given if it moves tensors elsewhere than to the slots of a budget."""
        if self.memory is not None:
            place = self.memory.memory.device
            if fn(torch.empty(0, dtype=torch.uint8, device=place)).device != place:
                raise not_within_memory("to", f"{_named(place)}, where its slots are")

    def _take(self, name: str, tensor: Tensor) -> None:
        """Put a tensor that is no view of a file in the place of one that was."""
        self.tensors[name], self.mapped = tensor, False

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle: what is stored, once, and not the views of it."""
        if self.memory is not None:
            raise not_within_memory("copy", "a model whose experts can all be in memory")
        # PyTorch does not unpickle dtypes of 8-bit floats.
        tensors = {n: (t.dtype, t.view(torch.uint8) if t.dtype.itemsize == 1 else t) for n, t in self.tensors.items()}
        views = dict.fromkeys(("gate_up", "down", "_weights", "residency"))
        return {**self.__dict__, **views, "mapped": False, "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.tensors = {name: tensor.view(dtype) for name, (dtype, tensor) in state["tensors"].items()}
        self._build()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.cut:
            raise unsupported(
                "save",
                got="a model whose experts are cut over processes",
                needs="all experts in one process",
                fix="Load the model without a mesh in one process, and save that.",
            )
        outer = prefix.removesuffix(f"{self.stored.path}.{STORE}." if self.stored.path else f"{STORE}.")
        for name, tensor in self.tensors.items():
            destination[outer + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        missing_keys, _, error_msgs = lists
        mapped = self.mapped
        if self.memory is not None and any(prefix + name in state_dict for name in self.tensors):
            raise not_within_memory("load_state_dict", "experts that are not read from their files")
        for name, tensor in list(self.tensors.items()):
            key, given = prefix + name, state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(key)
            elif given.shape != tensor.shape or given.dtype != tensor.dtype:
                stored = f"stored {tensor.dtype} {list(tensor.shape)}"
                error_msgs.append(f"{key}: {given.dtype} {list(given.shape)}, {stored}")
            elif local_metadata.get("assign_to_params_buffers", False):
                self._take(name, given)
            elif mapped:
                self._take(name, torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(given))
            else:
                tensor.copy_(given)
        self._build()

    def extra_repr(self) -> str:
        e, _, k = self.gate_up.shape
        return f"num_experts={e}, hidden_size={k}, {self.layout}"


def _of(module: nn.Module, name: str) -> Any:
    """What a module has under a name, or None, which `getattr` takes long to find."""
    for kept in (module.__dict__, module._parameters, module._buffers, module._modules):
        if name in kept:
            return kept[name]
    return getattr(module, name) if hasattr(type(module), name) else None


def _named(place: torch.device) -> str:
    return "the CPU" if place.type == "cpu" else str(place)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are nothing, or the same numbers in memory."""
    if one is None or other is None or one is other:
        return one is other
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(),
        other.dtype,
        other.shape,
        other.stride(),
    )


def find_in_state(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook of a model: hand each store the tensors that stand under the checkpoint's names."""
    for path, module in model.named_modules():
        if isinstance(module, ExpertStore):
            for name in module.tensors:
                if prefix + name in state_dict:
                    state_dict[f"{prefix}{path}.{name}"] = state_dict.pop(prefix + name)


def stored_weights(holder: nn.Module) -> ExpertWeights | TracedWeights | None:
    """The experts of a module that keeps them as a checkpoint stores them; None if they are its parameters."""
    store = holder._modules.get(STORE)
    return store.weights(holder) if isinstance(store, ExpertStore) else None
