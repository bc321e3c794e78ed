"""Stand-ins for the three interfaces of OpenAI's triton_kernels, in plain PyTorch; what they were asked is in `CALLS`.

Names, arguments and shapes are those of the packages that Triton 3.5, 3.6 and 3.8 came with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moestro.formats import PackedTensor, dequantize
from moestro.formats.mxfp4 import MXFP4

FP4 = "fp4"
CALLS: list[tuple[str, Any]] = []


@dataclass
class Wrapped:
    """A tensor with its layout; of FP4 the shape counts numbers."""

    data: Tensor
    dtype: Any
    layout: Any = None
    layout_options: Any = None


def wrap_torch_tensor(data: Tensor, dtype: Any = None) -> Wrapped:
    assert data.stride(-2) == 1, "the dimension that is summed over lies contiguous"
    return Wrapped(data, dtype)


def convert_layout(tensor: Wrapped, layout: Any, **options: Any) -> Wrapped:
    CALLS.append(("layout", (layout, options)))
    return Wrapped(tensor.data, tensor.dtype, layout, options)


def _dense(weights: Any, scales: Any) -> Tensor:
    """[E, K, N] in float32."""
    if scales is None:
        return weights.float()
    assert (weights.dtype, scales.dtype) == (FP4, None)
    data = weights.data.transpose(1, 2).contiguous()
    groups = data.shape[2] * 2 // MXFP4.scaling.columns
    own = scales.data.transpose(1, 2)[:, :, :groups].contiguous()
    return dequantize(PackedTensor(data, MXFP4, own), torch.float32).transpose(1, 2)


def swiglu_fn(z: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, up = z[:, ::2], z[:, 1::2]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _rows(x: Tensor, weights: Tensor, bias: Tensor | None, sizes: Tensor, rest: tuple[Any, Any]) -> Tensor:
    """Rows in the order of experts times their expert's weights."""
    fused, gammas = rest
    assert bias is None or bias.dtype == torch.float32
    experts = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    out = torch.einsum("rk,rkn->rn", x.float(), weights[experts])
    out = out if bias is None else out + bias[experts]
    if fused is not None:
        CALLS.append(("activation", fused))
        out = fused.specs.fn(out, *fused.fn_args)
    return (out if gammas is None else out * gammas[:, None]).to(x.dtype)


def matmul_ogs(
    x, w, bias, data, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None, fused_activation=None
):
    sizes, top_k = data.expt_hist, data.n_expts_act
    rows = x if gather_indx is None else x[gather_indx.src_indx // top_k]
    weights = _dense(w, precision_config.weight_scale)
    out = _rows(rows, weights, bias, sizes, (fused_activation, gammas))
    if scatter_indx is None:
        return out
    assert torch.equal(scatter_indx.src_indx[scatter_indx.dst_indx], torch.arange(len(out)))
    return out[scatter_indx.src_indx].view(-1, top_k, out.shape[1]).float().sum(1).to(x.dtype)


def matmul(
    a, b, bias, ragged, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None, fused_activation=None
):
    rows = a if gather_indx is None else a[gather_indx]
    weights = _dense(b, precision_config.b_mx_scale)
    out = _rows(rows, weights, bias, ragged.slice_sizes, (fused_activation, gammas))
    return out if scatter_indx is None else torch.empty_like(out).index_copy_(0, scatter_indx, out)


def reduce(x: Tensor, dim: int) -> tuple[Tensor, None]:
    return x.float().sum(dim).to(x.dtype), None


def _sorted(ids: Tensor, num_experts: int) -> SimpleNamespace:
    of = ids.flatten().argsort(stable=True)
    sizes = torch.bincount(ids.flatten(), minlength=num_experts)
    return SimpleNamespace(col_sum=sizes, col_sorted_indx=of, row_sorted_indx=of.argsort())


def _topk(x: Tensor, k: int, apply_softmax: bool, y_indx: Tensor) -> tuple[Tensor, Tensor]:
    assert not apply_softmax
    assert y_indx.dtype == torch.int32
    assert y_indx.shape[1] == k
    return x.gather(1, y_indx.long()), y_indx


def topk_tuple(x, k, apply_softmax=True, y_indx=None):
    return (*_topk(x, k, apply_softmax, y_indx), "bits")


def topk_sparse(x, k, apply_softmax=True, y_indx=None):
    values, ids = _topk(x, k, apply_softmax, y_indx)
    return SimpleNamespace(vals=values, indx=ids, mask_metadata=_sorted(ids, x.shape[1]))


@dataclass
class Routed:
    gate_scal: Tensor
    expt_hist: Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: Any


@dataclass
class Indices:
    src_indx: Tensor
    dst_indx: Tensor


def routing_from_bitmatrix(bits, values, ids, num_experts, top_k):
    assert bits == "bits"
    known = _sorted(ids, num_experts)
    of, to = known.col_sorted_indx, known.row_sorted_indx
    return Routed(values.flatten()[of], known.col_sum, num_experts, top_k, None), Indices(of, to), Indices(to, of)


def make_ragged_tensor_metadata(sizes: Tensor, num_rows: int) -> SimpleNamespace:
    assert int(sizes.sum()) == num_rows
    return SimpleNamespace(slice_sizes=sizes)


@dataclass
class EarlySpecs:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]


@dataclass
class LaterSpecs(EarlySpecs):
    reduction_n: int = 1


@dataclass
class EarlyActivation:
    specs: EarlySpecs
    fn_args: tuple[Any, ...]
    reduction_n: int


@dataclass
class LaterActivation:
    specs: LaterSpecs
    fn_args: tuple[Any, ...]


@dataclass
class EarlyPrecision:
    weight_scale: Any = None


@dataclass
class LaterPrecision:
    b_mx_scale: Any = None
    b_microblock_size: int | None = None

    def __post_init__(self) -> None:
        assert (self.b_mx_scale is None) == (self.b_microblock_size is None)


def update_opt_flags_constraints(constraints: dict[str, Any]) -> None:
    CALLS.append(("constraints", constraints))


def reset_opt_flags_constraints() -> None:
    CALLS.append(("constraints", None))


def values_by_class(mx_axis: int) -> Any:
    return "values", {"mx_axis": mx_axis}


def scales_by_class(mx_axis: int, num_warps: int) -> Any:
    return "scales", {"mx_axis": mx_axis, "num_warps": num_warps}


def values_layout(mx_axis: int) -> Any:
    assert mx_axis == -2
    return SimpleNamespace(of="values")


def scales_layout(mx_axis: int, num_warps: int) -> Any:
    assert (mx_axis, num_warps) == (-2, 8)
    return SimpleNamespace(of="scales")


_FLAGS = ("update_opt_flags_constraints", "reset_opt_flags_constraints")
_EARLY_MATMUL = ("matmul_ogs", "EarlyPrecision as PrecisionConfig")
_TENSOR = ("FP4", "wrap_torch_tensor", "convert_layout")
_LAYOUTS = "as make_default_matmul_mxfp4_w_layout", "as make_default_matmul_mxfp4_w_scale_layout"
_BY_CLASS = tuple(f"{a} {b}" for a, b in zip(("values_by_class", "scales_by_class"), _LAYOUTS, strict=True))
_BY_VALUE = tuple(f"{a} {b}" for a, b in zip(("values_layout", "scales_layout"), _LAYOUTS, strict=True))
_LATER = ("LaterSpecs as FnSpecs", "LaterActivation as FusedActivation")
_ROUTED = ("Routed as RoutingData", "Indices as GatherIndx", "Indices as ScatterIndx")

VERSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "3.5": {
        "matmul_ogs": (*_EARLY_MATMUL, "EarlySpecs as FnSpecs", "EarlyActivation as FusedActivation"),
        "matmul_ogs_details.opt_flags": _FLAGS,
        "routing": ("routing_from_bitmatrix",),
        "topk": ("topk_tuple as topk",),
        "tensor": _TENSOR,
        "tensor_details.layout": _BY_CLASS,
    },
    "3.6": {
        "matmul_ogs": (
            *_EARLY_MATMUL,
            *_LATER,
            "Routed as RoutingData",
            "Indices as GatherIndx",
            "Indices as ScatterIndx",
        ),
        "matmul_ogs_details.opt_flags": _FLAGS,
        "topk": ("topk_sparse as topk",),
        "tensor": (*_TENSOR, "make_ragged_tensor_metadata"),
        "tensor_details.layout": _BY_CLASS,
    },
    "3.8": {
        "matmul": ("matmul", "LaterPrecision as PrecisionConfig", *_LATER),
        "matmul_details.opt_flags": _FLAGS,
        "reduce": ("reduce",),
        "topk": ("topk_sparse as topk",),
        "tensor": (*_TENSOR, "make_ragged_tensor_metadata"),
        "tensor_details.layout": _BY_VALUE,
    },
}
"""Version of Triton -> module -> what it has."""


def write(folder: Path, version: str) -> None:
    """Write a package triton_kernels with a version's modules into the folder."""
    for module, names in {"swiglu": ("swiglu_fn",), **VERSIONS[version]}.items():
        path = folder.joinpath("triton_kernels", *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text("".join(f"from like_triton_kernels import {name}\n" for name in names))
