"""The weights of one layer's routed experts, as a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor

from moestro import formats
from moestro.errors import invalid_input, not_one_of, unsupported
from moestro.formats import INTEGERS, PackedTensor, SplitTensor, StoredExperts, WeightFormat, dense
from moestro.formats.encode import Search
from moestro.types import SWIGLU, Activation, InputFormat, register_pytree, unchecked

OutputNorm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Everything that defines E_0 .. E_{E-1}; expert e computes ``down @ activation(gate_up @ x + b) + b'``.

    Attributes:
        gate_up: [E, 2 * I, H] for gated experts, [E, I, H] for plain ones.
        down: [E, H, I].
        gate_up_bias: [E, 2 * I] (or [E, I]), or None.
        down_bias: [E, H], or None.
        activation: what stands between the two matmuls.
        output_norm: applied to each expert's output row [..., H] before it is weighted, or None.
        input_format: "float"; "int8" or "fp8-e4m3" to round rows before each of the two products, so that 8-bit
            integers or floats are multiplied.

    Raises:
        InvalidInputError: the shapes do not belong together, or lie on several devices; an unknown input format.
        UnsupportedError: int8 inputs and weights that are no integers, or fp8-e4m3 inputs and weights that are not.
    """

    gate_up: StoredExperts
    down: StoredExperts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = field(default_factory=Activation)
    output_norm: OutputNorm | None = None
    input_format: InputFormat = "float"

    def __post_init__(self) -> None:
        e, n, h = self.gate_up.shape
        halves = 2 if self.activation.gated else 1
        if n % halves or tuple(self.down.shape) != (e, h, n // halves):
            raise invalid_input(
                "ExpertWeights",
                got=f"gate_up {[e, n, h]} and down {list(self.down.shape)}",
                needs=f"gate_up [E, {'2 * I' if halves == 2 else 'I'}, H] and down [E, H, I]",
                fix="Pass a transposed checkpoint as weight.transpose(1, 2), and plain experts with "
                "Activation(gated=False).",
            )
        for name, bias, shape in (
            ("gate_up_bias", self.gate_up_bias, (e, n)),
            ("down_bias", self.down_bias, (e, h)),
        ):
            if bias is not None and tuple(bias.shape) != shape:
                raise invalid_input(
                    "ExpertWeights", got=f"{name} {list(bias.shape)}", needs=f"{list(shape)}", fix="One row per expert."
                )
        self.check_devices()
        check_input_format(self.input_format, (self.gate_up.format, self.down.format), "ExpertWeights")

    def check_devices(self) -> None:
        """Refuse tensors on several devices."""
        devices = {t.device for t in self.tensors}
        if len(devices) > 1:
            raise invalid_input(
                "ExpertWeights",
                got=f"tensors on {', '.join(sorted(map(str, devices)))}",
                needs="one device",
                fix="Move the layer with .to(device).",
            )

    @classmethod
    def from_dense(
        cls,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> ExpertWeights:
        """Wrap ordinary floating-point tensors; nothing is copied. Shapes and errors as for the class."""
        return cls(dense(gate_up), dense(down), gate_up_bias, down_bias, activation)

    def quantize(
        self, format: str | WeightFormat, search: Search = "nearest", input_format: InputFormat | None = None
    ) -> ExpertWeights:
        """The same experts in another format, stacked, each converted on its own; biases are kept as they are.

        A projection that is already one stack in the format is taken over, not copied. Packed experts are dequantised
        first, so what their format has lost stays lost. No gradient flows through.

        Args:
            format: a name of `moestro.formats.FORMATS` ("mxfp4"; dense ones too), or the format itself.
            search: how scales are chosen, "nearest" or "mse".
            input_format: as the attribute; None keeps it.

        Raises:
            InvalidInputError: an unknown format, one that cannot store such matrices, or weights that are not finite.
            UnsupportedError: as for the class.
        """
        form = formats.find_format(format) if isinstance(format, str) else format
        rows = self.input_format if input_format is None else input_format
        check_input_format(rows, (form,), "quantize")
        gate_up = quantize_experts(self.gate_up, form, search, "gate_up")
        down = quantize_experts(self.down, form, search, "down")
        return replace(self, gate_up=gate_up, down=down, input_format=rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor the weights are made of."""
        biases = (self.gate_up_bias, self.down_bias)
        return (*self.gate_up.tensors, *self.down.tensors, *(b for b in biases if b is not None))

    @cached_property
    def parts(self) -> Parts:
        """What a call of the primitive asks of the value, looked up once: it is frozen."""
        return Parts.of(self)

    @property
    def num_experts(self) -> int:
        return self.gate_up.num_experts

    @property
    def planned_experts(self) -> int:
        """How many experts a call is planned for: E, or of slots that hold some of a layer's, those of the layer."""
        return self.num_experts

    @property
    def hidden_size(self) -> int:
        return self.gate_up.num_columns

    @property
    def intermediate_size(self) -> int:
        return self.down.num_columns

    @property
    def bytes_per_expert(self) -> int:
        """Stored bytes that computing with one expert reads."""
        return sum(t.nbytes for t in self.tensors) // max(self.num_experts, 1)


@dataclass(frozen=True, eq=False)
class Parts:
    """The tensors of expert weights, and all else that they are made of.

    Attributes:
        tensors: as `ExpertWeights.tensors`.
        words: everything but the tensors, as a key; None where a tensor is no ordinary one or a format has no name.
        num_experts: E.
        unstacked: for each projection that is not stacked, the index of its first tensor and the tensors an expert has.
    """

    tensors: tuple[Tensor, ...]
    words: tuple[Any, ...] | None
    num_experts: int
    unstacked: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, weights: ExpertWeights) -> Parts:
        """Those of these weights."""
        num_experts, tensors = weights.num_experts, weights.tensors
        counts = [(len(s.tensors), isinstance(s, SplitTensor)) for s in (weights.gate_up, weights.down)]
        return cls(tensors, _words(weights, tensors), num_experts, unstacked_spans(counts, num_experts))

    def call_key(self) -> tuple[Any, ...] | None:
        """The words and, to tell layers apart, where the first and the last tensor lie."""
        tensors = self.tensors
        if self.words is None:
            return None
        recorded = tuple(t.requires_grad for t in tensors) if torch.is_grad_enabled() else None
        return recorded, self.words, tensors[0].data_ptr(), tensors[-1].data_ptr()

    def read_by(self, experts: Iterable[int]) -> list[int] | None:
        """The indices of the tensors that these experts' computation reads; None where all are stacked."""
        if not self.unstacked:
            return None
        found, most = list(self.shared), self.num_experts
        for e in experts:
            if 0 <= e < most:
                for start, each in self.unstacked:
                    found.extend(range(start + e * each, start + (e + 1) * each))
        return found

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """The indices of the tensors that are no single expert's."""
        of_experts = [range(start, start + self.num_experts * each) for start, each in self.unstacked]
        return tuple(i for i in range(len(self.tensors)) if not any(i in span for span in of_experts))


def unstacked_spans(counts: Iterable[tuple[int, bool]], num_experts: int) -> tuple[tuple[int, int], ...]:
    """`Parts.unstacked` for projections of so many tensors, of which each is stacked or not."""
    spans, start = [], 0
    for count, unstacked in counts:
        if unstacked:
            spans.append((start, count // num_experts))
        start += count
    return tuple(spans)


def _words(weights: ExpertWeights, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    stored = (weights.gate_up, weights.down)
    if not {*map(type, tensors)} <= _ORDINARY or not all(formats.is_registered(s.format) for s in stored):
        return None
    layouts = tuple((s.format.name, isinstance(s, SplitTensor), s.shape) for s in stored)
    biases = weights.gate_up_bias is not None, weights.down_bias is not None
    more = weights.planned_experts, weights.output_norm is not None, weights.input_format
    return layouts, biases, weights.activation.code, *more


_ORDINARY = {Tensor, torch.nn.Parameter}

_MULTIPLIED: dict[str, tuple[tuple[str, ...], str]] = {
    "int8": (INTEGERS, "integers: int8, int4, mxfp4, nvfp4 or fp4"),
    "fp8-e4m3": (("e4m3",), "8-bit floats: fp8-e4m3-tensor, fp8-e4m3-channel or fp8-e4m3-b128"),
}
"""By input format: elements of weights that such rows are multiplied by, and what these are called."""


def check_input_format(input_format: str, stored: Iterable[WeightFormat], operation: str) -> None:
    """Check that there is such an input format, and that its rows can be multiplied by weights of all these."""
    if input_format == "float":
        return
    if input_format not in _MULTIPLIED:
        raise not_one_of(operation, "input_format", input_format, ("float", *_MULTIPLIED))
    elements, called = _MULTIPLIED[input_format]
    for form in stored:
        if form.element not in elements:
            raise unsupported(
                operation,
                got=f"{input_format} inputs and weights stored as {form.name}",
                needs=f"weights that are {called}",
                fix="Quantise them to one of these formats, or leave inputs as float.",
            )


@torch.no_grad()
def quantize_experts(
    stored: StoredExperts,
    form: WeightFormat,
    search: Search,
    name: str,
    after: Callable[[int], object] = lambda expert: None,
) -> PackedTensor:
    """Experts [E, N, K] in another format, stacked; as they are if they are one stack in the format already.

    Beside the stack, no more than one expert is ever held in full precision. Errors are those of `formats.quantize`,
    and call the experts `name`. `after` is called with an expert's number when its stored weights are read no more.
    """
    if isinstance(stored, PackedTensor) and stored.format == form:
        return stored
    num_experts, num_rows, num_columns = stored.shape
    formats.check_shape(form, num_rows, num_columns, f"quantize {name}")
    stack: list[Tensor] = []
    for e, packed in enumerate(quantized(stored, form, search, name)):
        stack = stack or [t.new_empty(num_experts, *t.shape) for t in packed.tensors]
        for all_experts, own in zip(stack, packed.tensors, strict=True):
            all_experts[e] = own
        after(e)
    return PackedTensor(format=form, **dict(zip(form.names, stack, strict=True)))


def quantized(stored: StoredExperts, form: WeightFormat, search: Search, name: str) -> Iterator[PackedTensor]:
    """Each expert in another format, one after the other; `search` and `name` as for `quantize_experts`."""
    return (_quantized(stored.blocks(e), form, search, f"{name}[{e}]") for e in range(stored.num_experts))


def _quantized(blocks: Sequence[PackedTensor], form: WeightFormat, search: Search, name: str) -> PackedTensor:
    """One expert of these blocks of rows in another format; its full precision goes when this returns."""
    plain = [formats.dequantize(b, b.data.dtype if b.format.is_dense else torch.float32) for b in blocks]
    return formats.quantize(plain[0] if len(plain) == 1 else torch.cat(plain), form, search, name)


@dataclass(frozen=True)
class Layout:
    """How a list of tensors makes up the experts of one projection, in the order of their `tensors`.

    `num_blocks` are the matrices of each unstacked expert; 0 for one stack.
    """

    format: WeightFormat
    num_blocks: int = 0

    @classmethod
    def of(cls, stored: StoredExperts) -> Layout:
        return cls(stored.format, len(stored.matrices[0]) if isinstance(stored, SplitTensor) else 0)

    def num_experts(self, num_tensors: int, height: int) -> int:
        """E of the experts that so many tensors make up, the first of which has `height` entries."""
        return num_tensors // (self.num_blocks * len(self.format.names)) if self.num_blocks else height

    def build(self, tensors: Sequence[Tensor]) -> StoredExperts:
        """The experts made of these tensors; they come from a value of this layout and are not checked again."""
        names = self.format.names
        packed = [
            unchecked(PackedTensor, format=self.format, **dict(zip(names, tensors[i : i + len(names)], strict=True)))
            for i in range(0, len(tensors), len(names))
        ]
        if not self.num_blocks:
            return packed[0]
        matrices = (tuple(packed[i : i + self.num_blocks]) for i in range(0, len(packed), self.num_blocks))
        return unchecked(SplitTensor, matrices=tuple(matrices))


class Built:
    """Weights, and the tensors that they were made of; kept in a module they save making the same value at every call.

    A cast of the module may give `parameters` another dtype, `.data =` another shape; the `others` are replaced as a
    whole. A copy or a pickle of the module finds None in its place.
    """

    def __init__(
        self, weights: ExpertWeights, parameters: Sequence[Tensor | None], others: Sequence[Tensor | None] = ()
    ) -> None:
        self.weights = weights
        self._tensors = [*parameters, *others]
        self._kinds = [(t, t.dtype, t.shape, t.stride()) for t in parameters if t is not None]

    def is_current(self, parameters: Sequence[Tensor | None], others: Sequence[Tensor | None] = ()) -> bool:
        """Whether these are the same tensors, and the parameters still of the same dtypes, shapes and strides."""
        now = [*parameters, *others]
        same = len(now) == len(self._tensors) and all(map(is_, now, self._tensors))
        return same and all(t.dtype is d and t.shape == shape and t.stride() == s for t, d, shape, s in self._kinds)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


register_pytree(PackedTensor, static=("format",))
register_pytree(SplitTensor)
register_pytree(ExpertWeights, static=("activation", "output_norm", "input_format"))
