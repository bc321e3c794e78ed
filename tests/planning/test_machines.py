"""Machines that come along name the source of every figure; files with other keys or values are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.planning import Machine, machine_names, read_machine
from moestro.planning.machines import here

GOOD = 'memory = "8GB"\nbytes_per_second = "100GB/s"\nflops_per_second = 1e13\n'


@pytest.mark.parametrize("name", machine_names())
def test_every_figure_has_a_source(name):
    found = read_machine(name)
    plain = Machine("", 1, 1.0)
    given_keys = {key for key, value in vars(found).items() if value != getattr(plain, key)} - {"name", "sources"}
    assert given_keys - {"devices"} <= found.sources.keys()
    assert found.memory > 10**10
    assert found.balance("default") > 50


def test_a_file(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text(GOOD + "devices = 2\nmemory_share = 0.5\n[sources]\nmemory = 'its label'\n")
    found = read_machine(path)
    assert (found.name, found.memory, found.devices, found.read_rate) == ("box", 8 * 10**9, 2, 5e10)
    assert found.flops("mxfp4") == found.flops("float32") == 1e13
    assert not found.is_here
    path.write_text(GOOD.replace('"8GB"', "8e9"))
    assert type(read_machine(path).memory) is int


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("", "no bytes_per_second"),
        ("memory = [", "TOML"),
        (GOOD + "colour = 1", "key 'colour'"),
        (GOOD + "is_here = true", "key 'is_here'"),
        (GOOD + "devices = 0", "devices = 0"),
        (GOOD + "devices = 1.5", "devices = 1.5"),
        (GOOD + "memory_share = 1.5", "memory_share = 1.5"),
        (GOOD + "layer_seconds = -1", "layer_seconds = -1"),
        (GOOD + "sources = 3", "sources"),
        (GOOD.replace('"8GB"', '"much"'), "memory"),
        (GOOD.replace('"8GB"', "true"), "memory = True"),
        (GOOD.replace('"8GB"', "inf"), "memory = inf"),
        (GOOD.replace('"8GB"', "1.5"), "memory = 1.5"),
        (GOOD.replace('"100GB/s"', "inf"), "bytes_per_second = inf"),
        (GOOD + "link_seconds = nan", "link_seconds = nan"),
        (GOOD + "name = 3", "name = 3"),
        (GOOD.replace("1e13", '"fast"'), "flops_per_second"),
        (GOOD.replace("1e13", "{fp8 = 1e13}"), "default"),
        (GOOD.replace("1e13", "{default = 0}"), "flops_per_second.default = 0"),
    ],
)
def test_what_is_refused(tmp_path, text, about):
    path = tmp_path / "box.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"^\[plan\] got .+; needs .+\. .+") as error:
        read_machine(path)
    assert about in str(error.value)


def test_names_that_there_are_not(tmp_path):
    for name in ("h999", tmp_path / "none.toml", tmp_path):
        with pytest.raises(InvalidInputError, match=r"^\[plan\]"):
            read_machine(name)


def test_more_memory_than_there_is():
    with pytest.raises(InvalidInputError, match="of this machine"):
        here(2**60)


@given(st.dictionaries(st.sampled_from(["bf16", "fp8", "mxfp4"]), st.floats(1e9, 1e16)), st.floats(1e9, 1e16))
def test_a_rate_by_the_formats_own_name_or_its_family(rates, other):
    machine = replace(read_machine("h200"), flops_per_second={**rates, "default": other}, compute_share=1.0)
    assert machine.flops("fp8-e4m3-b128") == rates.get("fp8", other)
    assert machine.flops("mxfp4") == rates.get("mxfp4", other)
