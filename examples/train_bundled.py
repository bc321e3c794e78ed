"""Train the small language model that moestro bundles, from nothing, on a CPU.

What it does, the finished parts skipped when it runs again:

1. corpus     the running interpreter's own standard library (about 29 MB of Python source, PSF licence); a hash of
              each file's path decides which 2 to 3 % are held out, on every machine the same, copies left out;
2. tokenizer  byte-level BPE, 4096 tokens, learned on the training files only;
3. training   a Qwen3-MoE with 6 layers and 16 experts (4 active) for a given number of minutes: the learning rate
              follows the clock, so a slow or busy machine finishes on time having seen fewer tokens;
4. export     bfloat16 safetensors, configuration and tokenizer, as `from_pretrained` wants them;
5. evaluation bits per byte on every held-out byte against `xz -9e`, expert load, how many of 50 function heads are
              completed into Python, a few greedy completions.

How to run it (needs torch, transformers, tokenizers and, for torch.compile, a C++ compiler):

    python examples/train_bundled.py --work build/bundled --export src/moestro/bundled --minutes 60
    python examples/train_bundled.py --evaluate src/moestro/bundled

Killed half-way, the same command continues from the last checkpoint (written every three minutes). The bundled model
saw 28.5 million tokens in 60 minutes on two cores of an AMD EPYC (Zen 4), 7,900 a second in the mean.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import lzma
import math
import os
import random
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import function_heads
from train_layers import HeadLoss, MuonAdamW, causal_blocks, sorted_experts

# Read at process start only: the memory of large tensors stays in the process from step to step.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(2**28)}

Model = transformers.Qwen3MoeForCausalLM
Tokens = transformers.PreTrainedTokenizerFast

SEED = 20
VOCAB = 4096
END = "<|endoftext|>"
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15, "no_repeat_ngram_size": 6}
HELD_OUT_PER_MILLE = 25
UNIT = 1024  # tokens in one shuffled piece of the corpus; also the context of the last part of training
UNITS_PER_STEP = 8
FUNCTIONS_FROM = 0.9  # from which part of the time on the functions of all files are documents of their own, too
CONTEXTS = ((0.0, 256), (0.65, 512), (0.92, UNIT))  # from which part of the time on: short contexts are faster
PEAK_LR, PEAK_MUON_LR, WARM_UP = 3e-3, 8e-3, 0.015
CUT_AT_HEAD = 0.1  # the part of top-level functions and classes that begin a document of their own
BALANCE = 0.04  # weight of the load-balancing loss, which is 1 when every expert gets the same share
CHECKPOINT_EVERY_S, EVALUATE_EVERY_S, LOG_EVERY_STEPS = 180.0, 240.0, 20

# A word takes the one space, dot or underscore before it along; a line break takes the next line's indentation along.
SPLIT = r"[ ._]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n[ \t]*|\s+"
PROMPTS = ("def fibonacci(n):", "class Stack:", "import os\n\ndef ", "for i in range(", "def __init__(self, ")
RESULTS = Path(__file__).with_suffix(".results.json")


def why_excluded(path: str, text: str) -> str | None:
    """The reason a standard-library file is no part of the corpus, or None."""
    parts = path.split("/")
    if {"site-packages", "dist-packages", "__pycache__"} & set(parts):
        return "not the standard library"
    if parts[0].startswith(("_sysconfigdata", "config-")):
        return "describes one machine's build"
    if parts[0] == "pydoc_data":
        return "generated documentation text"
    if parts[0] == "encodings" and "gencodec.py" in text:
        return "generated character table"
    if path.startswith("lib2to3/tests/data/"):
        return "deliberately odd test data"
    return None


def is_held_out(path: str) -> bool:
    """Decided by the path alone, so one file falls on the same side under every Python version."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % 1000 < HELD_OUT_PER_MILLE


def read_corpus() -> tuple[list[str], list[str]]:
    """The texts to train on and the texts held out, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if why_excluded(path, ""):
            continue  # unread: installed packages are ten times as many files
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of test files in other encodings
        if text and not why_excluded(path, text):
            (held_out if is_held_out(path) else train).append(text)
    secret = set(held_out)
    return [text for text in train if text not in secret], held_out


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Byte-level BPE: every text round-trips, common indentations are one token, and END starts every text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    special = {"bos_token": END, "eos_token": END, "pad_token": END}
    options = {"model_max_length": UNIT, "clean_up_tokenization_spaces": False}
    Tokens(tokenizer_object=tokenizer, **special, **options).save_pretrained(folder)


def functions_of(texts: list[str]) -> Iterator[str]:
    """Every function and method of the texts that Python can read, moved to the left edge."""
    for text in texts:
        lines = text.splitlines(keepends=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def cut_randomly(text: str, rng: random.Random, mean: int = 300) -> Iterator[str]:
    """Pieces of a text. Encoded one by one they show the model the odd token borders where a prompt may end."""
    start = 0
    while start < len(text):
        end = start + 1 + int(rng.expovariate(1 / mean))
        yield text[start:end]
        start = end


def encode_documents(tokenizer: Tokens, texts: list[str]) -> list[np.ndarray]:
    """Every document as token ids, with the end-of-text token before it."""
    rng = random.Random(SEED)
    documents = []
    for text in texts:
        cut = list(cut_randomly(text, rng))
        pieces = tokenizer(cut, add_special_tokens=False, verbose=False)["input_ids"]
        documents.append(np.concatenate([[tokenizer.eos_token_id], *pieces]).astype(np.uint16))
    return documents


def find_heads(tokenizer: Tokens, documents: list[np.ndarray]) -> list[np.ndarray]:
    """Where top-level functions and classes begin: a first word at the start of a line."""
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    breaks = np.array([text.endswith("\n") for text in texts])
    words = np.array([text in ("def", "class", "async") for text in texts])
    return [1 + np.flatnonzero(breaks[document[:-1]] & words[document[1:]]) for document in documents]


class Batches:
    """Step number and part of the time -> batch: the position in the data is the step, so resuming needs no state."""

    def __init__(self, documents: list[np.ndarray], heads: list[np.ndarray], functions: list[np.ndarray]) -> None:
        self.documents, self.heads, self.functions = documents, heads, functions
        self.per_epoch = (sum(map(len, documents)) - 1) // UNIT // UNITS_PER_STEP
        self.shuffled = (-1, False)

    def __call__(self, step: int, done: float) -> tuple[Tensor, Tensor]:
        epoch, index = divmod(step, self.per_epoch)
        if self.shuffled != (epoch, done >= FUNCTIONS_FROM):
            self._shuffle(epoch, done >= FUNCTIONS_FROM)
        length = context(done)
        rows = self.order[index * UNITS_PER_STEP : (index + 1) * UNITS_PER_STEP]
        units = torch.from_numpy(np.stack([self.stream[r * UNIT : r * UNIT + UNIT + 1] for r in rows]).astype(np.int64))
        return units[:, :-1].reshape(-1, length), units[:, 1:].reshape(-1, length)

    def _shuffle(self, epoch: int, with_functions: bool) -> None:
        """Documents cut at some heads and joined in a new order, then the pieces of that stream in a random order.
        A prompt is often the head of a function: without the cuts none would ever begin a document."""
        rng = np.random.default_rng([SEED, epoch])
        self.shuffled = (epoch, with_functions)
        end = self.documents[0][:1]
        parts = list(self.functions) if with_functions else []
        for document, heads in zip(self.documents, self.heads, strict=True):
            first, *others = np.split(document, heads[rng.random(len(heads)) < CUT_AT_HEAD])
            parts += [first, *(np.concatenate([end, part]) for part in others)]
        self.stream = np.concatenate([parts[i] for i in rng.permutation(len(parts))])
        self.order = rng.permutation((len(self.stream) - 1) // UNIT)


def new_model() -> Model:
    """Seven million parameters; bfloat16 weights, while the rotary frequencies stay float32."""
    torch.manual_seed(SEED)
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": UNIT}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "moe_intermediate_size": 64}
    unused = {"intermediate_size": 256, "router_aux_loss_coef": BALANCE / 4}  # by transformers' count: 4 when even
    shape = {"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 6, "tie_word_embeddings": True}
    config = transformers.Qwen3MoeConfig(**shape, **attention, **experts, **unused, **SPECIAL_IDS)
    model = Model(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def hidden_and_balance(model: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states, load-balancing loss (1 when even) and each expert's share of the tokens' choices.

    The balancing loss is taken layer by layer: transformers' own pools all layers' routers before it compares, so
    that one layer's idle expert can hide behind another layer's busy one.
    """
    out = model.model(input_ids=x, use_cache=False, output_router_logits=True)
    balance, shares = [], []
    for router_logits in out.router_logits:
        probabilities = router_logits.float().softmax(-1)
        chosen = probabilities.topk(model.config.num_experts_per_tok, -1).indices
        share = F.one_hot(chosen, probabilities.shape[-1]).float().mean((0, 1))
        shares.append(share)
        balance.append(probabilities.shape[-1] * (share * probabilities.mean(0)).sum())
    return out.last_hidden_state.flatten(0, 1), torch.stack(balance).mean(), torch.stack(shares)


def learning_rate(done: float) -> float:
    """Of the peak: up to one, then straight to zero; `done` is the part of the time that has passed."""
    if done < WARM_UP:
        return max(done, 1e-4) / WARM_UP
    return max(0.0, (1 - done) / (1 - WARM_UP))


def context(done: float) -> int:
    return max(length for begins, length in CONTEXTS if done >= begins)


class Run:
    """One training run in a folder: its model, optimizer, clock, checkpoint and log."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.file, self.log_file, self.seconds = folder / "checkpoint.pt", folder / "log.jsonl", seconds
        self.model = new_model()
        self.model.set_experts_implementation("sorted")
        self.model.set_attn_implementation("causal_blocks")
        self.optimizer = MuonAdamW(self.model)
        self.step, self.tokens, self.before = 0, 0, 0.0
        if self.file.exists():
            saved = torch.load(self.file)
            self.step, self.tokens, self.before = saved["step"], saved["tokens"], saved["elapsed"]
            self.optimizer.load(saved)
            rows = self.log_file.read_text().splitlines(keepends=True)
            self.log_file.write_text("".join(row for row in rows if json.loads(row)["step"] <= self.step))
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started

    def save(self) -> None:
        """In one go. No random state: the weights were drawn once, and the batch is a function of step and time."""
        state = {"step": self.step, "tokens": self.tokens, "elapsed": self.elapsed}
        state |= self.optimizer.state()
        fresh = self.file.with_suffix(".fresh")
        torch.save(state, fresh)
        fresh.replace(self.file)

    def log(self, **values: float) -> None:
        row = {"step": self.step, "tokens": self.tokens, "elapsed_s": round(self.elapsed, 1)}
        row |= {name: float(f"{value:.4g}") for name, value in values.items()}
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        with self.log_file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def train(run: Run, batches: Batches, sample: list[np.ndarray], sample_bytes: int) -> None:
    """Steps until the time is up. The clock, not a step count, drives the schedule."""
    compiled = torch.compile(hidden_and_balance, dynamic=False)
    saved = evaluated = logged = run.elapsed
    recent: list[tuple[float, float]] = []
    run.model.train()
    while (done := run.elapsed / run.seconds) < 1.0:
        x, y = batches(run.step, done)
        hidden, balance, shares = compiled(run.model, x)
        loss = HeadLoss.apply(hidden, run.model.lm_head.weight, y.flatten())
        (loss + BALANCE * balance).backward()
        lr = learning_rate(done)
        norm = run.optimizer.step(PEAK_LR * lr, PEAK_MUON_LR * lr)
        run.step, run.tokens = run.step + 1, run.tokens + x.numel()
        recent.append((loss.item(), balance.item()))
        if run.step % LOG_EVERY_STEPS == 0:
            rate = len(recent) * x.numel() / (run.elapsed - logged)
            means = np.mean(recent, axis=0)
            load = {"share_min": shares.min().item(), "share_max": shares.max().item()}
            run.log(loss=means[0], balance=means[1], norm=norm, lr=PEAK_LR * lr, tokens_per_s=rate, **load)
            recent, logged = [], run.elapsed
        if run.elapsed - evaluated > EVALUATE_EVERY_S:
            bits, _ = bits_and_load(run.model, sample)
            run.log(held_out_sample_bits_per_byte=bits / sample_bytes)
            recent, evaluated, logged = [], run.elapsed, run.elapsed
        if run.elapsed - saved > CHECKPOINT_EVERY_S:
            run.save()
            saved = run.elapsed
    run.save()


def windows(document: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Pieces of a document and how many of each piece's targets an earlier piece has scored already."""
    half = UNIT // 2
    yield document[: UNIT + 1], 0
    for start in range(half, len(document) - 1 - half, half):
        yield document[start : start + UNIT + 1], half


@torch.inference_mode()
def bits_and_load(model: Model, documents: list[np.ndarray]) -> tuple[float, Tensor]:
    """The documents' total negative log2-likelihood, and every layer's share of choices per expert."""
    layers = model.model.layers
    counts = torch.zeros(len(layers), model.config.num_experts)

    def count(layer: int, chosen: Tensor) -> None:
        counts[layer] += torch.bincount(chosen.flatten(), minlength=model.config.num_experts)

    gates = [layer.mlp.gate for layer in layers]
    hooks = [g.register_forward_hook(lambda _m, _a, out, i=i: count(i, out[2])) for i, g in enumerate(gates)]
    pieces = sorted((p for d in documents for p in windows(d)), key=lambda p: (len(p[0]), p[1]))
    bits = 0.0
    for (_, skip), group in itertools.groupby(pieces, key=lambda p: (len(p[0]), p[1])):
        for ids in torch.from_numpy(np.stack([piece for piece, _ in group]).astype(np.int64)).split(8):
            logits = model(ids[:, :-1], use_cache=False).logits[:, skip:].float()
            nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1 + skip :].flatten(), reduction="sum")
            bits += nats.item() / math.log(2)
    for hook in hooks:
        hook.remove()
    return bits, counts / counts.sum(1, keepdim=True)


def complete(model: Model, tokenizer: Tokens, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def evaluate(folder: Path, results: Path) -> None:
    """Prints and stores what the exported model is worth."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = Model.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    texts = read_corpus()[1]
    raw = [text.encode() for text in texts]
    total = sum(map(len, raw))

    def xz(pieces: list[bytes]) -> float:
        return round(8 * sum(len(lzma.compress(p, preset=9 | lzma.PRESET_EXTREME)) for p in pieces) / total, 4)

    documents = [np.array(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    assert all(tokenizer.decode(d[1:]) == text for d, text in zip(documents, texts, strict=True)), "round trip"
    bits, load = bits_and_load(model, documents)
    numbers = {
        "python": sys.version.split()[0],
        "held_out_files": len(texts),
        "held_out_bytes": total,
        "held_out_tokens": sum(map(len, documents)) - len(documents),
        "bits_per_byte": round(bits / total, 4),
        "xz_9e_per_file_bits_per_byte": xz(raw),
        "xz_9e_together_bits_per_byte": xz([b"".join(raw)]),
        "expert_share_min_per_layer": [round(v, 4) for v in load.amin(1).tolist()],
        "expert_share_max_per_layer": [round(v, 4) for v in load.amax(1).tolist()],
        "function_heads": function_heads.measure(folder),
        "folder_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "completions": {prompt: complete(model, tokenizer, prompt) for prompt in PROMPTS},
    }
    results.write_text(json.dumps(numbers, indent=2) + "\n")
    for name, value in numbers.items():
        print(f"{name}: {value}" if name != "completions" else "\n\n".join(numbers["completions"].values()))


def make(work: Path, folder: Path, minutes: float) -> None:
    """Corpus, tokenizer, training, export; every step skipped when its result is there."""
    work.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = read_corpus()
    print(f"corpus: {len(train_texts)} files to train on, {len(held_out_texts)} held out", flush=True)
    if not (work / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(train_texts, work / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tokenizer")
    documents = encode_documents(tokenizer, train_texts)
    print(f"tokens to train on: {sum(map(len, documents))}", flush=True)
    sample = [np.array(tokenizer(t, verbose=False)["input_ids"][:512]) for t in held_out_texts]
    sample_bytes = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in sample)
    functions = encode_documents(tokenizer, list(functions_of(train_texts)))
    batches = Batches(documents, find_heads(tokenizer, documents), functions)
    run = Run(work, 60 * minutes)  # its clock starts here
    train(run, batches, sample, sample_bytes)
    run.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.GenerationConfig(**SAMPLING, **SPECIAL_IDS).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train or evaluate the bundled model.")
    parser.add_argument("--work", type=Path, default=Path("build/bundled"), help="tokenizer, checkpoint and log")
    parser.add_argument("--export", type=Path, default=Path("src/moestro/bundled"), help="the finished model")
    parser.add_argument("--minutes", type=float, default=60, help="training time, over all restarts")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="only evaluate the model in FOLDER")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the evaluation's numbers go")
    options = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)
    ALL_ATTENTION_FUNCTIONS.register("causal_blocks", causal_blocks)
    torch.set_flush_denormal(True)
    if not options.evaluate:
        make(options.work, options.export, options.minutes)
    evaluate(options.evaluate or options.export, options.results)


if __name__ == "__main__":
    main()
