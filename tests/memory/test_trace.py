"""Traces: what is written is read, what is damaged or something else is refused in one sentence."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.memory import LayerSize, Recorder, Trace, Visit, merged, read_trace
from moestro.memory.trace import FIELDS

FOUR_PARTS = re.compile(r"\[read_trace\] got .+; needs .+\. .+\.")
SIZES = (LayerSize(6, 2, 100, "a"), LayerSize(4, 3, 50, "b"))


def small() -> Trace:
    recorder = Recorder("small")
    recorder.add(3, SIZES[0], np.array([[0, 5], [1, -1]]))
    recorder.add(7, SIZES[1], np.array([[0, 1, 2], [3, 2, 9]]))
    recorder.add(3, SIZES[0], np.tile([2, 4], (40, 1)))
    return recorder.trace()


def same(one: Trace, other: Trace) -> bool:
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("at", "tokens", "ids"))
    return arrays and (one.model, one.layers) == (other.model, other.layers)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "without ending"
    small().write(path)
    found = read_trace(path)
    assert same(found, small())
    assert found.layers == SIZES
    assert found.visits == (
        Visit(0, {0: 1, 1: 1, 5: 1}),
        Visit(1, {0: 1, 1: 1, 2: 2, 3: 1}),
        Visit(0, {2: 40, 4: 40}, frozenset({2, 4})),
    )
    assert (found.decoded, found.prompted) == (2, 40)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_trace_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    recorder = Recorder(data.draw(st.text(max_size=5)))
    for _ in range(data.draw(st.integers(1, 6))):
        layer = data.draw(st.integers(0, 1))
        shape = data.draw(st.integers(1, 40)), SIZES[layer].top_k
        ids = data.draw(st.lists(st.integers(-3, 9), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        recorder.add(layer, SIZES[layer], np.array(ids).reshape(shape))
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    recorder.trace().write(path)
    assert same(read_trace(path), recorder.trace())


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("stored") / "t.npz"
    small().write(path)
    return path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_the_same(
    stored: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A byte changed or an end cut off: one sentence, or the very same trace; never other numbers or a traceback."""
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        damaged = stored[:at]
    else:
        damaged = stored[:at] + bytes([stored[at] ^ data.draw(st.integers(1, 255))]) + stored[at + 1 :]
    path = tmp_path_factory.mktemp("damaged") / "t.npz"
    path.write_bytes(damaged)
    try:
        found = read_trace(path)
    except InvalidInputError as error:
        refused = " ".join(str(error).split())
    else:
        assert same(found, small())
        return
    assert FOUR_PARTS.fullmatch(refused)


def header(**changes: object) -> dict:
    layers = [{"experts": 6, "top_k": 2, "expert_bytes": 100, "pool_key": ""}]
    return {"version": 1, "model": "m", "layers": layers, **changes}


def arrays(**changes: object) -> dict[str, np.ndarray]:
    made = {"layers": np.array([0]), "tokens": np.array([1]), "ids": np.array([3, 4]), "header": header(), **changes}
    return {name: raw(value) if name == "header" else np.asarray(value) for name, value in made.items()}


def raw(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def layer(**changes: object) -> dict:
    return header(layers=[{**header()["layers"][0], **changes}])  # type: ignore[index]


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (arrays(header=header(version=2)), "(version 2)"),
        (arrays(header=[1]), "(version [1])"),
        (arrays(header=header(layers=[])), "visits of other layers"),
        (arrays(header=header(layers=3)), "not iterable"),
        (arrays(header=layer(experts=1)), "a layer of 1 experts, top-k 2"),
        (arrays(header=layer(experts=2**40)), "a layer of 1099511627776 experts"),
        (arrays(header=header(layers=layer(experts=2**20)["layers"] * 2)), "2,097,152 experts in 2 layers"),
        (arrays(header=layer(top_k=2.0)), "a layer of 6 experts"),
        (arrays(header=layer(more=1)), "unexpected keyword argument"),
        (arrays(layers=[1]), "visits of other layers"),
        (arrays(layers=[-1]), "visits of other layers"),
        (arrays(layers=[0, 0]), "visits of other layers"),
        (arrays(tokens=[0]), "visits of other sizes"),
        (arrays(tokens=[2]), "visits of other sizes"),
        (arrays(ids=[3, 6]), "ids of other experts"),
        (arrays(ids=[3, -2]), "ids of other experts"),
        (arrays(ids=[[3, 4]]), "arrays of other shapes"),
        (arrays(ids=[3.0, 4.0]), "arrays of other shapes"),
    ],
)
def test_other_contents(tmp_path: Path, made: dict[str, np.ndarray], got: str) -> None:
    np.savez(tmp_path / "t.npz", **made)
    with pytest.raises(InvalidInputError) as caught:
        read_trace(tmp_path / "t.npz")
    assert got in str(caught.value)
    assert FOUR_PARTS.fullmatch(str(caught.value))


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="No such file"):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(InvalidInputError, match="Is a directory"):
        read_trace(tmp_path)
    np.save(tmp_path / "ids.npy", np.zeros((2, 2), np.int64))
    with pytest.raises(InvalidInputError, match="not a zip file"):
        read_trace(tmp_path / "ids.npy")
    np.savez(tmp_path / "some.npz", header=raw(header()))
    with pytest.raises(InvalidInputError, match=r"layers\.npy"):
        read_trace(tmp_path / "some.npz")
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    with ZipFile(tmp_path / "pickled.npz", "w", ZIP_DEFLATED) as file:
        for name in ("header", "layers", "tokens", "ids"):
            file.writestr(f"{name}.npy", pickled.getvalue())
    with pytest.raises(InvalidInputError, match="allow_pickle"):
        read_trace(tmp_path / "pickled.npz")


CSV = "step,layer,token,expert,weight\n0,2,0,3,.5\n0,2,0,1,.5\n0,5,0,0,1\n1,2,0,4,1\n1,5,0,2,.2\n1,5,0,1,.1\n"


def test_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    found = read_trace(path, expert_bytes=10)
    assert found.layers == (LayerSize(5, 2, 10), LayerSize(5, 2, 10))
    assert found.visits == (
        Visit(0, {1: 1, 3: 1}),
        Visit(1, {0: 1}),
        Visit(0, {4: 1}),
        Visit(1, {1: 1, 2: 1}),
    )
    assert read_trace(path, expert_bytes=10, experts=8).layers[0].experts == 8


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "(columns )"),
        ("step,layer,expert\n0,0,1\n", "(columns step, layer, expert)"),
        ("step,layer,token,expert\n", "(no line)"),
        ("step,layer,token,expert\n0,0,0,one\n", "'one'"),
        ("step,layer,token,expert\n0,0,0\n", "None"),
        ("step,layer,token,expert\n0,0,0,-1\n", "expert -1 in line 2"),
        ("step,layer,token,expert\n0,0,0,9\n", "expert 9 where there are 8"),
        ("step,layer,token,expert\n0,0,0,99999999\n", "expert 99999999 in line 2"),
        ("step,layer,token,expert\n0,0,0,1\x00\n", "'1\\x00'"),
    ],
)
def test_other_csv_files(tmp_path: Path, text: str, got: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path, expert_bytes=10, experts=8)
    assert got in str(caught.value)
    assert FOUR_PARTS.fullmatch(str(caught.value))


def test_sizes_are_for_csv_files(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(CSV)
    small().write(tmp_path / "t.npz")
    for name, sizes in (("t.csv", {}), ("t.npz", {"expert_bytes": 5}), ("t.npz", {"experts": 5})):
        with pytest.raises(InvalidInputError, match="the size of an expert"):
            read_trace(tmp_path / name, **sizes)


def test_runs_of_one_model_are_joined() -> None:
    both = merged([small(), small()])
    assert both.visits == small().visits * 2
    assert both.model == "small"
    other = Recorder("other")
    other.add(0, SIZES[0], np.array([[0, 1]]))
    with pytest.raises(InvalidInputError, match="2 traces of 2 models"):
        merged([small(), other.trace()])


def test_a_run_without_visits() -> None:
    recorder = Recorder("idle")
    recorder.add(0, SIZES[0], np.zeros((0, 2), np.int64))
    assert not recorder
    with pytest.raises(InvalidInputError, match="idle, which ran no expert layer"):
        recorder.trace()


def test_route_traces_are_read(tmp_path):
    path = tmp_path / "a.route.csv"
    rows = [
        (0, 0, token, layer, slot, 3 * token + slot) for token in range(2) for layer in range(2) for slot in range(2)
    ]
    rows += [(0, 1, step, layer, slot, 9 + slot) for step in range(2) for layer in range(2) for slot in range(2)]
    lines = [
        f"{turn},{phase},{step},{layer},{slot},{expert},0.5,0,7" for turn, phase, step, layer, slot, expert in rows
    ]
    head = [
        "# route_trace v1",
        "# layer=0 expert_bytes=7",
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes",
    ]
    path.write_text("\n".join([*head, *lines]) + "\n")
    trace = read_trace(path, expert_bytes=7, experts=16)
    assert trace.layers == (LayerSize(16, 2, 7),) * 2
    assert [(visit.layer, dict(visit.experts)) for visit in trace.visits] == [
        (0, {0: 1, 1: 1, 3: 1, 4: 1}),
        (1, {0: 1, 1: 1, 3: 1, 4: 1}),
        *[(layer, {9: 1, 10: 1}) for _ in range(2) for layer in range(2)],
    ]
    path.write_text("turn,phase,layer,expert\n0,0,0,1\n")
    with pytest.raises(InvalidInputError, match="columns turn, phase"):
        read_trace(path, expert_bytes=7)


def test_a_shape_that_no_memory_holds(tmp_path: Path) -> None:
    begin = io.BytesIO()
    np.lib.format.write_array_header_1_0(begin, {"descr": "<i8", "fortran_order": False, "shape": (2**50,)})
    with ZipFile(tmp_path / "t.npz", "w") as file:
        for name in FIELDS:
            file.writestr(f"{name}.npy", begin.getvalue())
    with pytest.raises(InvalidInputError, match=r"t\.npz"):
        read_trace(tmp_path / "t.npz")
