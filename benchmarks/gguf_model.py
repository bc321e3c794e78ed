"""Write a checkpoint folder as a GGUF file, the same numbers in the same bits, for llama.cpp.

python benchmarks/gguf_model.py FOLDER FILE.gguf                        experts as MXFP4, all else in bfloat16
python benchmarks/gguf_model.py FOLDER FILE.gguf --experts q4_0         experts in another type of ggml

Needs the `gguf` package (`python benchmarks/install_peers.py FOLDER llama`). Of the tokenizer, what each token stands
for is written, which a server needs to answer in text, and one merge only: prompts are given as tokens. Norms, biases,
sinks and routers are float32, as llama.cpp's own conversion has them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from moestro.checkpoint import Checkpoint, ExpertSource
from moestro.errors import MoestroError, unsupported
from moestro.formats import FORMATS, PackedTensor, dequantize, quantize
from moestro.hf.sources import read_sources
from peers import installed

OPERATION = "gguf"
ARCHITECTURES = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}
"""Those whose conversion is written here: `model_type` of Transformers -> the name in GGUF."""

EXPERT_TYPES = ("mxfp4", "q4_0", "q8_0", "bf16", "f32")
DENSE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
REST_TYPES = ("bf16", "f16", "q8_0", "f32")


@dataclass(frozen=True)
class Storage:
    """The types of ggml that weights get: those of the experts, and the matrices beside them."""

    experts: str = "mxfp4"
    rest: str = "bf16"


@dataclass(frozen=True)
class _Item:
    """A tensor of the file: its type, and the pieces [rows, bytes] that its bytes are made of when it is its turn."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray[Any, Any]]]


def write_gguf(folder: Path, target: Path, storage: Storage | None = None) -> None:
    """Write what is in `folder` to `target`; memory holds one expert at a time.

    Raises:
        ImportError: the package `gguf` is not there.
        UnsupportedError: an architecture that is not in `ARCHITECTURES`, or tensors that GGUF has no name for.
    """
    gguf = installed.module("gguf", "llama")
    storage = Storage() if storage is None else storage
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise unsupported(
            OPERATION,
            got=f"{folder}, a {config['model_type']}",
            needs=f"one of {', '.join(ARCHITECTURES)}",
            fix="Write its metadata and names here as well.",
        )
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    _metadata(writer, gguf, config)
    _vocabulary(writer, folder, config["vocab_size"])
    items = list(_items(gguf, folder, config, storage))
    for item in items:
        kind = gguf.GGMLQuantizationType[item.kind.upper()]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(item.shape)) // per_block * block_bytes
        writer.add_tensor_info(item.name, item.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for item in items:
        writer.write_tensor_data(_Pieces(item, writer))
    writer.close()


def read_bytes(file: Path) -> float:
    """Bytes of the weights in a GGUF file that one token reads: of the experts its share, of the embedding one row."""
    reader = installed.module("gguf", "llama").GGUFReader(file)
    counts = {name.rpartition(".")[2]: field for name, field in reader.fields.items()}
    share = counts["expert_used_count"].contents() / counts["expert_count"].contents()
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    total = 0.0
    for tensor in reader.tensors:
        rows = int(tensor.shape[1]) if tensor.name == "token_embd.weight" and not tied else 1
        total += int(tensor.n_bytes) * (share if "_exps." in tensor.name else 1 / rows)
    return total


def _metadata(writer: Any, gguf: Any, config: dict[str, Any]) -> None:
    """What llama.cpp asks of these architectures."""
    writer.add_type("model")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling")
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _vocabulary(writer: Any, folder: Path, size: int) -> None:
    """What each token stands for, as byte-level tokenizers write it."""
    if not (folder / "tokenizer.json").is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    tokens += [f"<unused{n}>" for n in range(len(tokens), size)]
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if n in special else 1 for n in range(size)])  # control, normal
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])  # GGUF keeps no empty list
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)


def _items(gguf: Any, folder: Path, config: dict[str, Any], storage: Storage) -> Iterator[_Item]:
    _, checkpoint, sources = read_sources(folder)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    of_experts = {name for source in sources for name in source.names}
    interleaved = config["model_type"] == "gpt_oss"
    for name in checkpoint.names:
        if name in of_experts:
            continue
        if name.endswith("experts.gate_up_proj_bias"):
            yield from _biases(checkpoint, name)
            continue
        stem = name.replace("proj_bias", "proj.bias")
        found = names.get_name(stem, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise unsupported(
                OPERATION, got=f"{name} in {folder}", needs="a tensor that GGUF has a name for", fix="Name it here."
            )
        yield _plain(gguf, checkpoint, name, _named(found), storage)
    for source in sources:
        yield from _experts(gguf, source, interleaved, storage)


def _named(found: str) -> str:
    """The full name: parameters without a suffix of their own (attention sinks) are weights."""
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def _plain(gguf: Any, checkpoint: Checkpoint, name: str, target: str, storage: Storage) -> _Item:
    shape = tuple(checkpoint.entry(name).shape)
    exact = len(shape) == 1 or target.endswith(".bias") or "ffn_gate_inp" in target
    kind = "f32" if exact else storage.rest

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        for part in checkpoint.tensor(name).split(4096):
            yield encode(gguf, part, kind)

    return _Item(target, kind, shape, pieces)


def _biases(checkpoint: Checkpoint, name: str) -> Iterator[_Item]:
    """gate_up's bias [E, 2 * I], whose rows alternate, as two."""
    experts, rows = checkpoint.entry(name).shape
    for start, part in enumerate(("gate", "up")):

        def pieces(start: int = start) -> Iterator[np.ndarray[Any, Any]]:
            yield checkpoint.tensor(name)[:, start::2].float().contiguous().numpy()

        yield _Item(f"blk.{layer_of(name)}.ffn_{part}_exps.bias", "f32", (experts, rows // 2), pieces)


def _experts(gguf: Any, source: ExpertSource, interleaved: bool, storage: Storage) -> Iterator[_Item]:
    """A projection [E, N, K]: down as one tensor, gate_up as two."""
    e, n, k = source.stored.shape
    rows = {"down": slice(None)}
    if source.target.endswith("gate_up_proj"):
        halves = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, n // 2), slice(n // 2, None))
        rows = dict(zip(("gate", "up"), halves, strict=True))
    for part, chosen in rows.items():

        def pieces(chosen: slice = chosen) -> Iterator[np.ndarray[Any, Any]]:
            for expert in range(e):
                whole = np.concatenate([encode(gguf, m, storage.experts) for m in source.stored.blocks(expert)])
                yield np.ascontiguousarray(whole[chosen])

        shape = (e, n // len(rows), k)
        yield _Item(f"blk.{layer_of(source.target)}.ffn_{part}_exps.weight", storage.experts, shape, pieces)


def layer_of(name: str) -> int:
    """The number in `model.layers.{number}.`."""
    return int(name.split(".layers.")[1].split(".")[0])


def encode(gguf: Any, rows: Tensor | PackedTensor, kind: str) -> np.ndarray[Any, Any]:
    """Rows [N, K], or a vector, in a type of ggml: an array [N, ...] of its bytes or numbers; ggml itself quantises."""
    if kind == "mxfp4":
        packed = rows if isinstance(rows, PackedTensor) else quantize(rows, "mxfp4")
        if packed.format != FORMATS["mxfp4"]:
            packed = quantize(dequantize(packed), "mxfp4")
        return mxfp4_blocks(packed).numpy()
    numbers = dequantize(rows) if isinstance(rows, PackedTensor) else rows
    if kind in DENSE:
        return numbers.to(DENSE[kind]).contiguous().view(torch.uint8).numpy()
    ggml = ctypes.CDLL(str(installed.path("llama/llama_cpp/lib/libggml-base.so")))
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    n, k = numbers.shape
    wide, out = numbers.float().contiguous(), np.empty((n, k // per_block * block_bytes), dtype=np.uint8)
    source, target = ctypes.c_void_p(wide.data_ptr()), ctypes.c_void_p(out.ctypes.data)
    shape = (ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_int64(k))
    ggml.ggml_quantize_chunk(ctypes.c_int(type_), source, target, *shape, None)
    return out


def mxfp4_blocks(packed: PackedTensor) -> Tensor:
    """MXFP4 [N, K] -> uint8 [N, K / 32 * 17], ggml's blocks: an exponent, then bytes of weights j and (high) j + 16."""
    n, k = packed.shape
    assert packed.scales is not None
    pairs = packed.data.view(torch.uint8).reshape(n, k // 32, 16)
    codes = torch.stack([pairs & 15, pairs >> 4], -1).view(n, k // 32, 32)
    scales = packed.scales.view(torch.uint8).reshape(n, k // 32, 1)
    return torch.cat([scales, codes[..., :16] | codes[..., 16:] << 4], -1).view(n, k // 32 * 17)


class _Pieces:
    """What the writer takes for an array: it asks for the bytes' number, and to be written."""

    def __init__(self, item: _Item, writer: Any) -> None:
        self.item = item
        self.nbytes = next(iter(writer.tensors[0].values())).nbytes

    def tofile(self, file: Any) -> None:
        written = 0
        for piece in self.item.pieces():
            written += piece.nbytes
            piece.tofile(file)
        assert written == self.nbytes, f"{self.item.name}: {written} bytes of {self.nbytes}"


def main() -> int:
    """Returns the exit code: 2 for a folder that cannot be written so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--experts", choices=EXPERT_TYPES, default="mxfp4")
    parser.add_argument("--rest", choices=REST_TYPES, default="bf16")
    options = parser.parse_args()
    try:
        write_gguf(options.folder, options.file, Storage(options.experts, options.rest))
    except (MoestroError, ImportError) as error:
        print(f"benchmarks/gguf_model.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
