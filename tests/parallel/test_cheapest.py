"""Rows in 8 bits, and the dispatcher that is chosen by cost."""

from __future__ import annotations

import pytest
import torch

from moestro.errors import InvalidInputError
from moestro.parallel import AllToAllDispatcher, LinkRates, Place, Placement, wire_error
from moestro.parallel.wire import decode, encode
from parallel import choosing
from parallel.cases import Layer
from parallel.choosing import SLOW_BYTES, SLOW_START

CASE = Layer((1, 3, 1), 8, 2, 64, 48, (13, 0, 22))


@pytest.mark.parametrize("wire_format", ["int8", "fp8-e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_8_bits(group, wire_format, dtype):
    case = Layer((1, 3, 1), 8, 2, 64, 48, (13, 0, 22), dtype=dtype)
    found = group(3).run(choosing.in_bits, case, wire_format)
    plain = group(3).run(choosing.in_bits, case, "float")
    for (differs, error, sent, _), (_, none, whole, _) in zip(found, plain, strict=True):
        assert differs is None
        assert none == 0 < error < (0.05 if wire_format == "fp8-e4m3" else 0.02)
        assert all(0 < sent[r] <= whole[r] for r in whole if whole[r])
    assert [lost > 0 for *_, lost in found] == [True, False, True]
    # Rank 1 has no tokens: it sends results only, in the dtype of x. Rank 0 sends rank 1 rows only.
    rows, results = found[0][2][1], found[1][2][0]
    assert rows // (64 + 4) == results // (64 * dtype.itemsize) > 0


def test_an_encoded_row_is_its_definition():
    rows = torch.tensor([[0.0, 0.0, 0.0], [127.0, -3.0, 0.4], [1e-30, -1e-30, 0.0]])
    data = encode(rows, "int8")
    assert data.shape == (3, 3 + 4)
    assert data[1, :3].view(torch.int8).tolist() == [127, -3, 0]
    back = decode(data, "int8", torch.float32)
    assert back[0].tolist() == [0.0, 0.0, 0.0]
    assert back[1].tolist() == [127.0, -3.0, 0.0]
    assert back[2, :2].tolist() == rows[2, :2].tolist()
    for bad in (float("nan"), float("inf")):
        broken = decode(encode(torch.tensor([[1.0, bad], [1.0, 2.0]]), "int8"), "int8", torch.float32)
        assert not broken[0].isfinite().any()
        assert broken[1].isfinite().all()


def test_an_error_that_can_be_computed_by_hand():
    assert wire_error(torch.tensor([[127.0, 0.5]]), "int8") == pytest.approx(0.5 / (127**2 + 0.25) ** 0.5)
    assert wire_error(torch.zeros(0, 4), "int8") == wire_error(torch.zeros(2, 4), "fp8-e4m3") == 0.0


@pytest.mark.parametrize("wire_format", ["int8", "fp8-e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_numbers_stay_finite(wire_format, dtype):
    largest = torch.finfo(dtype).max
    rows = torch.tensor([[largest, -largest, 0.0]], dtype=dtype)
    assert torch.equal(decode(encode(rows, wire_format), wire_format, dtype), rows)


@pytest.mark.parametrize(
    ("rows", "wire_format", "got"),
    [
        (torch.zeros(2, 4), "int4", "wire_format='int4'"),
        (torch.zeros(4), "int8", "rows [4] of torch.float32"),
        (torch.zeros(2, 4, dtype=torch.int64), "int8", "rows [2, 4] of torch.int64"),
    ],
    ids=["format", "one row", "integers"],
)
def test_what_has_no_error(rows, wire_format, got):
    with pytest.raises(InvalidInputError) as raised:
        wire_error(rows, wire_format)
    assert str(raised.value).startswith(f"[wire_error] got {got}")


def test_gradients_pass(group):
    for finite, some in group(3).run(choosing.gradient_in_bits, Layer((1, 3, 1), 8, 2, 64, 48)):
        assert finite
        assert some


def test_what_is_refused():
    place = Place(Placement.contiguous(4, 2), None)  # type: ignore[arg-type]
    for options in ({"wire_format": "int4"}, {"wire_format": "int8", "exact": True}):
        with pytest.raises(InvalidInputError, match=r"\[AllToAllDispatcher\] got wire_format="):
            AllToAllDispatcher(place, **options)
    with pytest.raises(InvalidInputError, match=r"\[LinkRates\] got 0 s and 0 bytes per second"):
        LinkRates((0.0, 0.0), (0.0, 1.0))


@pytest.mark.parametrize("route", ["random", "holes", "first", "none"])
@pytest.mark.parametrize(
    ("rates", "name"), [(SLOW_START, "all-gather"), (SLOW_BYTES, "all-to-all")], ids=["start", "bytes"]
)
def test_the_choice_is_that_of_the_costs(group, route, rates, name):
    case = Layer((1, 3, 1), 8, 1, 64, 48, (13, 0, 22), route=route)
    found = group(3).run(choosing.chosen, case, rates)
    assert len({str(predictions) for _, predictions, _, _ in found}) == 1
    for differs, (first, second), said, text in found:
        assert differs is None
        assert first.name == name
        assert first.seconds <= second.seconds
        assert said[0] == "all-gather of counts"
        assert len(said) == 1 + first.messages
        assert f"  dispatch {first}; {second}\n" in text


def test_predicted_bytes_are_those_sent(group):
    """For 13, 0 and 22 tokens that all name expert 0 alone, on rank 0."""
    case = Layer((1, 3, 1), 8, 1, 64, 48, (13, 0, 22), route="first")
    (_, predictions, _, _), *_ = group(3).run(choosing.chosen, case, SLOW_BYTES)
    swaps, gathers = predictions
    assert swaps.num_bytes == 22 * (2 * 64 * 4 + 8)
    assert gathers.num_bytes == 2 * 22 * (64 * 4 + 8 + 64 * 4)
    assert swaps.seconds == pytest.approx(3e-6 + swaps.num_bytes / 1e6)
    assert gathers.seconds == pytest.approx(3e-6 + gathers.num_bytes / 1e6)


def test_rates_are_measured_once_and_agreed(group):
    found = group(3).run(choosing.measured)
    assert len({rates for rates, _ in found}) == 1
    assert all(same for _, same in found)
    rates = found[0][0]
    assert min(*rates.all_to_all, *rates.all_gather) > 0
    for differs, predictions, _, _ in group(3).run(choosing.chosen, CASE, None):
        assert differs is None
        assert {each.name for each in predictions} == {"all-to-all", "all-gather"}


def test_slices_and_other_meshes(group):
    for mesh in ((1, 2, 2), (2, 2, 1)):
        for differs, *_ in group(4).run(choosing.chosen, Layer(mesh, 7, 3, 32, 40), SLOW_BYTES):
            assert differs is None


def test_ranks_with_other_rates(fresh):
    for said in fresh(3).run(choosing.other_rates, CASE):
        assert said.startswith("CollectiveError: [CheapestDispatcher] got different option: "), said
