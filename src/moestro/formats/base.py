"""What every weight format says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.errors import invalid_input


@dataclass(frozen=True)
class WeightFormat:
    """A stored number system.

    Attributes:
        name: what users write ("bfloat16").
        bits: bits per stored weight, scales included.
        storage: dtype of the tensor that holds the data.
    """

    name: str
    bits: float
    storage: torch.dtype


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Expert weights as stored: the data, and the format that says how to read it.

    Attributes:
        data: [E, N, K] for the dense formats, any strides; a transposed checkpoint is passed as a transposed view.
        format: the `WeightFormat` of `data`.

    Raises:
        InvalidInputError: the data is not three-dimensional or not of the format's storage dtype.
    """

    data: Tensor
    format: WeightFormat

    def __post_init__(self) -> None:
        if self.data.dim() != 3 or self.data.dtype != self.format.storage:
            raise invalid_input(
                "PackedTensor",
                got=f"{self.data.dtype} data of shape {list(self.data.shape)} for format {self.format.name}",
                needs=f"{self.format.storage} data of shape [num_experts, rows, columns]",
                fix="Stack the experts along dimension 0 and name the format the data is stored in.",
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The logical shape [E, N, K], whatever the packing."""
        e, n, k = self.data.shape
        return e, n, k

    @property
    def nbytes(self) -> int:
        """Bytes of all experts as stored."""
        return self.data.numel() * self.data.element_size()
