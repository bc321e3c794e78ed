"""What a format costs a model: against Transformers' own code, and within bounds for the bundled model."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.conftest import SIZES, byte_tokenizer
from moestro.errors import InvalidInputError, MoestroError
from moestro.formats import FORMATS, dequantize, quantize
from moestro.hf.corpus import read_corpus
from moestro.hf.quality import Options, Variant, measure, variants
from moestro.hf.text_model import bundled_folder
from moestro.ops import dispatch
from moestro.quality.report import QualityReport, Row, headline
from moestro.quality.score import windows
from source import ROOT
from tolerances import assert_close

CONTEXT = 32
TEXT = "def f(n):\n    return n * 2  # é\n" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with 32 tokens of context, experts of 32 columns, and a tokenizer that puts nothing in front."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("quality")
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 32, "max_position_embeddings": CONTEXT, "moe_intermediate_size": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def copy_of(folder: Path, target: Path, **changed: object) -> Path:
    """The model with other weights: name of a tensor (dots as underscores twice) -> function of it."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changed.items():
        key = name.replace("__", ".")
        weights[key] = value(weights[key])  # type: ignore[operator]
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


class Eager:
    """The model in Transformers' own code, its experts rounded to a format; it notes what its expert layers see."""

    def __init__(self, folder: Path, variant: Variant | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        self.experts = [layer.mlp.experts for layer in self.model.model.layers]
        self.seen: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.experts]
        for experts, seen in zip(self.experts, self.seen, strict=True):
            for weight in (experts.gate_up_proj, experts.down_proj):
                if variant is not None:
                    packed = quantize(weight.data, variant.format, variant.search or "nearest")
                    weight.data.copy_(dequantize(packed))
            experts.register_forward_hook(lambda _, given, y, seen=seen: seen.append((*given, y)))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids[None]).logits[0].double()


@torch.no_grad()
def expected(folder: Path, variant: Variant, ids: torch.Tensor) -> dict[str, object]:
    """Every number of a row by its definition, from two models of Transformers."""
    baseline, model = Eager(folder), Eager(folder, variant)
    nats, divergences, same, total = [], [], [], 0
    for read, targets in windows(ids, CONTEXT):
        p, q = (F.log_softmax(m.logits(read), -1)[-targets.numel() :] for m in (baseline, model))
        nats += (-q[range(len(targets)), targets]).tolist()
        divergences += F.kl_div(q, p, log_target=True, reduction="none").sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        total += len(targets)
    layers = []
    for experts, ours, theirs in zip(model.experts, model.seen, baseline.seen, strict=True):
        error = norm = changed = choices = 0.0
        for (_, ids_q, _, _), (x, ids_p, weights, y) in zip(ours, theirs, strict=True):
            error += float((experts.forward(x, ids_p, weights).double() - y.double()).square().sum())
            norm += float(y.double().square().sum())
            for a, b in zip(ids_q.tolist(), ids_p.tolist(), strict=True):
                changed, choices = changed + len(set(b) - set(a)), choices + len(b)
        layers.append((math.sqrt(error / norm), changed / choices))
    return {
        "tokens": total,
        "nats": math.fsum(nats),
        "kl": math.fsum(divergences) / total,
        "p99": sorted(divergences)[math.ceil(0.99 * total) - 1],
        "same": sum(same) / total,
        "layers": layers,
    }


@pytest.mark.parametrize(
    "variant", [Variant("mxfp4", "nearest"), Variant("int4-g32", "mse"), Variant("int8", "nearest")]
)
def test_a_row_is_what_transformers_and_the_definitions_say(folder: Path, text: Path, variant: Variant) -> None:
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])
    assert len(list(windows(ids, CONTEXT))) > 3
    report = measure(folder, [variant], Options(text=text))
    found, wanted = report.rows[0], expected(folder, variant, ids)
    assert report.text.num_tokens == wanted["tokens"] == ids.numel() - 1
    assert report.text.num_bytes == len(TEXT.encode()) - 3  # the first token, "def", is given
    nats = found.bits_per_byte * math.log(2) * report.text.num_bytes
    assert found.bits_per_token == pytest.approx(nats / math.log(2) / report.text.num_tokens)
    numbers = [nats, found.kl_mean, found.kl_p99, *(x.error for x in found.layers)]
    layers = wanted["layers"]
    right = [wanted["nats"], wanted["kl"], wanted["p99"], *(error for error, _ in layers)]  # type: ignore[attr-defined]
    for actual, value in zip(numbers, right, strict=True):
        # Two float32 models that order their sums differently: a bfloat16's worth of room.
        assert_close(torch.tensor([actual]), torch.tensor([float(value)]), torch.bfloat16)
    assert found.top1_agreement == wanted["same"]
    assert [x.changed for x in found.layers] == [changed for _, changed in layers]  # type: ignore[attr-defined]
    assert found.kl_mean > 0
    assert [x.path for x in found.layers] == [f"model.layers.{i}.mlp.experts" for i in range(2)]


def test_the_baseline_itself_costs_nothing(folder: Path, text: Path) -> None:
    report = measure(folder, [Variant("float32")], Options(text=text))
    row, own = report.rows[0], report.baseline
    assert (row.bits_per_byte, row.perplexity, row.change) == (own.bits_per_byte, own.perplexity, 0.0)
    assert (row.kl_mean, row.kl_p99, row.top1_agreement) == (0.0, 0.0, 1.0)
    assert (row.expert_error, row.routing_changed) == (0.0, 0.0)


def test_two_runs_give_the_same_numbers_and_leave_nothing_behind(folder: Path, text: Path) -> None:
    wanted = variants(["mxfp4", "bf16"], ["nearest", "mse"])
    one, again = (measure(folder, wanted, Options(text=text, dtype="bfloat16")) for _ in range(2))
    assert [replace(row, seconds=0.0) for row in one.rows] == [replace(row, seconds=0.0) for row in again.rows]
    assert not dispatch._OBSERVERS.get()
    assert {row.dtype for row in one.rows} == {"bfloat16"}
    assert one.baseline.dtype == "float32"


def test_progress(folder: Path, text: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = measure(folder, variants(["mxfp4", "int8"]), Options(text=text), lambda *at: seen.append(at))
    each = len(list(windows(torch.zeros(report.text.num_tokens + 1), CONTEXT)))
    assert [name for name, _, _ in seen] == ["mxfp4 nearest"] * (each + 1) + ["int8 nearest"] * (each + 1)
    assert [done for _, done, _ in seen] == [*range(each + 1), *range(each, 2 * each + 1)]
    assert {total for _, _, total in seen} == {2 * each}


def test_against_another_format(folder: Path, text: Path) -> None:
    report = measure(folder, [Variant("mxfp4", "nearest"), Variant("float32")], Options("mxfp4", text=text))
    assert (report.baseline.format, report.baseline.bits_per_weight) == ("mxfp4", 4.25)
    same, other = report.rows
    assert same.kl_mean == 0.0 < other.kl_mean


def test_rows_as_int8_are_the_variants_and_not_the_baselines(folder: Path, text: Path) -> None:
    wanted = variants(["int8"], all_formats=True)
    exact, rounded = (
        measure(folder, wanted, Options(text=text, input_format=name))  # type: ignore[arg-type]
        for name in ("float", "int8")
    )
    assert exact.as_json()["baseline"]["bits_per_byte"] == rounded.as_json()["baseline"]["bits_per_byte"]
    assert rounded.as_json()["baseline"]["input_format"] == "float"
    before, after = exact.rows[0], rounded.rows[0]
    assert 0 < before.expert_error < after.expert_error < 5 * before.expert_error
    assert {row.input_format for row in rounded.measured} == {"int8"}
    assert all("weights that are integers" in str(row.reason) for row in rounded.rows if row.format == "bfloat16")
    assert "int8 inputs" in headline(rounded)[2]


def test_projections_of_the_variants(folder: Path, text: Path) -> None:
    wanted = variants(["float32"])
    plain, stored = (measure(folder, wanted, Options(text=text, projections=name)) for name in ("torch", "int8"))
    assert [row.projections for row in (stored.baseline, plain.rows[0], stored.rows[0])] == ["torch", "torch", "int8"]
    assert plain.rows[0].kl_mean == 0 < stored.rows[0].kl_mean
    assert "projections int8" in headline(stored)[2]
    with pytest.raises(InvalidInputError, match="projections='int9'"):
        Options(projections="int9")


def test_which_variants() -> None:
    found = variants(["bf16", "mxfp4", "bfloat16"], ["mse", "nearest", "mse"])
    assert found == [Variant("bfloat16"), Variant("mxfp4", "mse"), Variant("mxfp4", "nearest")]
    every = variants(["mxfp4"], all_formats=True)
    assert every[0] == Variant("mxfp4", "nearest")
    assert {v.format for v in every} == set(FORMATS) - {"float64"}
    assert [v.format for v in every if v.needed] == ["mxfp4"]


def test_a_format_that_does_not_fit(folder: Path, text: Path) -> None:
    report = measure(folder, variants(["int8"], all_formats=True), Options(text=text, tokens=5))
    skipped = {row.format: row.reason for row in report.rows if row.status == "skipped"}
    assert set(skipped) == {name for name in FORMATS if "g64" in name or "g128" in name}
    assert skipped["int4-g64"] == "got a matrix of 64 x 32; needs rows whose length is a multiple of 64"
    with pytest.raises(InvalidInputError, match="multiple of 64"):
        measure(folder, variants(["int8", "int4-g64"]), Options(text=text))


def test_weights_that_are_not_finite(folder: Path, text: Path, tmp_path: Path) -> None:
    """NaN outside the experts reaches the logits; inside them a format refuses it by name."""
    nan = {"model__norm__weight": lambda w: w * math.nan}
    with pytest.raises(InvalidInputError, match="logits with NaN or infinity"):
        measure(copy_of(folder, tmp_path / "norm", **nan), variants(["mxfp4"]), Options(text=text))
    with pytest.raises(InvalidInputError, match="logits with NaN or infinity"):
        measure(tmp_path / "norm", variants(["mxfp4"], all_formats=True), Options(text=text, tokens=4))


def test_an_optional_format_that_fails_on_the_way_is_a_line(folder: Path, text: Path, tmp_path: Path) -> None:
    """Weights beyond float16's range: that format cannot hold them, the others can."""
    names = [n for n in load_file(folder / "model.safetensors") if n.endswith("down_proj.weight")]
    large = {names[0].replace(".", "__"): lambda w: w * 1e6}
    target = copy_of(folder, tmp_path / "large", **large)
    report = measure(target, variants(["bf16"], all_formats=True), Options(text=text, tokens=8))
    status = {row.format: row for row in report.rows}
    assert status["float16"].status == "skipped"
    assert "down_proj" in str(status["float16"].reason)
    assert status["bfloat16"].status == status["mxfp4"].status == "ok"
    with pytest.raises(MoestroError):
        measure(target, variants(["fp16"]), Options(text=text, tokens=8))


class Letters:
    """A tokenizer of characters, with a start token or without."""

    def __init__(self, start: bool) -> None:
        self.start = [0] if start else []

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [*self.start, *map(ord, text)]}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids[len(self.start) if ids[:1] == [0] else 0 :]))


@pytest.mark.parametrize(
    ("start", "limit", "tokens", "num_bytes"),
    [(False, None, 4, 6), (True, None, 5, 7), (False, 2, 2, 3), (True, 2, 2, 3), (True, 9, 5, 7), (True, 1, 1, 1)],
)
def test_tokens_and_their_bytes(tmp_path: Path, start: bool, limit: int | None, tokens: int, num_bytes: int) -> None:
    """Of "aéx€" and a line break, with one, two, one, three and one byte... the first is given where nothing starts."""
    path = tmp_path / "x.txt"
    path.write_bytes("aéxé\n".encode())
    found = read_corpus(Letters(start), 2, path, limit)
    assert (found.text.num_tokens, found.text.num_bytes) == (tokens, num_bytes)
    assert found.documents[0].tolist() == [*([0] if start else []), *map(ord, "aéxé\n")][: tokens + 1]
    assert len(found.windows) == len(list(windows(torch.zeros(tokens + 1), 2)))


def test_documents_are_cut_where_the_tokens_are_reached() -> None:
    some, more = (read_corpus(Letters(True), 64, None, limit) for limit in (5_000, 9_000))
    assert (some.text.num_tokens, more.text.num_tokens) == (5_000, 9_000)
    assert sum(d.numel() - 1 for d in more.documents) == 9_000
    assert torch.equal(torch.cat(more.documents)[:5_000], torch.cat(some.documents)[:5_000])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "which is empty"),
        (b"a", "of which no token can be predicted"),
        (b"ab\xff", "whose byte 2 is no UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_text_that_cannot_be_measured(tmp_path: Path, data: bytes | None, says: str) -> None:
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidInputError, match=says):
        read_corpus(Letters(False), 8, path)


def test_one_token_can_be_predicted_after_a_start_token(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("é")
    assert read_corpus(Letters(True), 8, tmp_path / "x").text.num_bytes == 2


# The bundled model, on a cut of the text. Bounds are those that the docs state.
TOKENS = 1_536
PAGE = ROOT / "docs" / "reference" / "quality.md"
BOUNDS = {
    name: (float(shift) / 100, float(divergence))
    for name, shift, divergence in re.findall(
        r"^\| `([\w-]+)` \| ([\d.]+) % \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE
    )
}
FOUR_BITS = [name for name, form in FORMATS.items() if form.bits < 5]
FITTING = [name for name in FOUR_BITS if "g128" not in name]


@pytest.fixture(scope="module")
def wide() -> QualityReport:
    """float32 throughout, so that formats differ by what they store and by nothing else."""
    formats = [n for n in FORMATS if n.startswith("fp8")] + ["int8"]
    wanted = [*variants(formats), *variants(FITTING, ["nearest", "mse"])]
    return measure(None, wanted, Options("float32", tokens=TOKENS))


def beyond(row: Row) -> list[float]:
    """The share by which bits per byte changed, and the mean divergence, if one of them is out of bounds."""
    found = [abs(row.change), row.kl_mean]
    return found if any(x > bound for x, bound in zip(found, BOUNDS[row.format], strict=True)) else []


def test_every_format_has_a_bound() -> None:
    fitting = {n for n, form in FORMATS.items() if form.bits <= 16 and "g128" not in n}
    assert fitting - {"float16"} == BOUNDS.keys()
    assert BOUNDS["bfloat16"][0] == 0.001
    assert {BOUNDS[n][0] for n in BOUNDS if n.startswith("fp8") or n == "int8"} == {0.005}


def test_bfloat16_throughout_is_as_good_as_float32() -> None:
    row = measure(None, variants(["bf16"]), Options("float32", "bfloat16", tokens=TOKENS)).rows[0]
    assert beyond(row) == []
    assert row.kl_mean > 0  # it did compute in bfloat16


def test_formats_stay_within_the_stated_bounds(wide: QualityReport) -> None:
    assert {f"{row.format} {row.search}": found for row in wide.rows if (found := beyond(row))} == {}


def test_search_improves_on_nearest(wide: QualityReport) -> None:
    """The experts' outputs for every format; predictions where nearest leaves range unused, as no zero point does."""
    by_search = {(row.format, row.search): row for row in wide.rows}
    for name in FITTING:
        nearest, mse = by_search[name, "nearest"], by_search[name, "mse"]
        assert mse.expert_error < nearest.expert_error, name
        assert name.endswith("-zp") or mse.kl_mean < nearest.kl_mean, name


def test_search_improves_every_stored_weight_matrix() -> None:
    weights = load_file(bundled_folder() / "model.safetensors")
    stacks = {n: w.float() for n, w in weights.items() if ".layers.3.mlp.experts" in n and w.dim() >= 2}
    assert stacks
    for name in FITTING:
        for key, weight in list(stacks.items())[:2]:
            nearest, mse = (
                (dequantize(quantize(weight, name, search)) - weight).square().sum() for search in ("nearest", "mse")
            )
            assert mse < nearest, (name, key)


def test_the_baseline_predicts_as_transformers_does() -> None:
    """The bundled model, read whole by Transformers' own code."""
    report = measure(None, variants(["int8"]), Options(tokens=1_000))
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    corpus = read_corpus(tokenizer, 1024, None, 1_000)
    model = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32, experts_implementation="eager")
    nats = 0.0
    with torch.no_grad():
        for document in corpus.documents:
            logits = model.eval()(document[None, :-1]).logits[0]
            nats += float(F.cross_entropy(logits.double(), document[1:], reduction="sum"))
    own = report.baseline.bits_per_byte * math.log(2) * report.text.num_bytes
    assert_close(torch.tensor([own]), torch.tensor([nats]))
    assert json.dumps(report.as_json())
