"""Transposed parameters become K-contiguous inside their own storage, or are left alone with a reason."""

from __future__ import annotations

import copy
import itertools
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from moestro.hf import accelerate, experts, served
from moestro.hf.layout import is_k_contiguous, make_k_contiguous, why_not_in_place

SHAPES = [(1, 1, 1), (4, 3, 5), (8, 16, 16), (2, 1, 7), (3, 9, 1)]


def parameter(shape=(4, 6, 10), dtype=torch.float32):
    return nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype))


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage an operation returned that no argument had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_values_same_storage_other_order(shape, dtype):
    weight = parameter(shape, dtype)
    value, place = weight.detach().clone(), weight.data_ptr()
    assert make_k_contiguous(weight) == "K-contiguous"
    assert torch.equal(weight, value)
    assert weight.shape == shape
    assert weight.data_ptr() == place
    assert weight.requires_grad
    assert weight.is_leaf
    assert is_k_contiguous(weight)
    assert weight.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_a_second_time_does_nothing():
    weight = parameter()
    make_k_contiguous(weight)
    version = weight._version
    assert make_k_contiguous(weight) == "K-contiguous"
    assert weight._version == version


def test_needs_no_more_than_one_expert_s_matrix():
    weight = parameter((16, 32, 48))
    with Allocations() as seen:
        make_k_contiguous(weight)
    assert 0 < seen.largest <= 32 * 48 * 4


@pytest.mark.parametrize("grad", [True, False])
def test_a_whole_model_needs_no_more_than_one_expert_s_matrix(grad):
    model = zoo.build("gpt_oss").model
    with torch.set_grad_enabled(grad), Allocations() as seen:
        accelerate(model)
    largest = max(p.numel() * p.element_size() // p.shape[0] for p in model.parameters() if p.dim() == 3)
    probes = 16 * 128 * 4 * 4  # float32 of the activation's probe, a few at a time
    assert seen.largest <= max(largest, probes)
    assert {entry.layout for entry in served(model)} == {"K-contiguous"}


def test_copies_and_casts_keep_the_order():
    weight = parameter()
    make_k_contiguous(weight)
    assert is_k_contiguous(copy.deepcopy(weight))
    assert is_k_contiguous(weight.to(torch.bfloat16))


def left_alone(weight, reason):
    value, stride = weight.detach().clone(), weight.stride()
    assert reason in why_not_in_place(weight)
    assert make_k_contiguous(weight) == f"strided ({why_not_in_place(weight)})"
    assert weight.stride() == stride
    assert torch.equal(weight, value)


def test_an_alias_of_the_storage_forbids_it():
    weight = parameter()
    alias = weight.detach()
    kept = alias.clone()
    left_alone(weight, "another tensor uses the same storage")
    assert torch.equal(alias, kept)
    del alias
    assert make_k_contiguous(weight) == "K-contiguous"


def test_a_piece_of_a_larger_storage_is_left_alone():
    left_alone(nn.Parameter(torch.randn(2, 4, 6, 10)[1]), "shares its storage")


def test_a_file_mapping_is_left_alone_and_the_file_unchanged(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(torch.arange(240, dtype=torch.float32).numpy().tobytes())
    before = path.read_bytes()
    for shared in (True, False):
        mapped = nn.Parameter(torch.from_file(str(path), shared=shared, size=240).view(4, 6, 10))
        left_alone(mapped, "mapped or shared")
    assert path.read_bytes() == before


def test_shared_memory_is_left_alone():
    weight = parameter()
    weight.share_memory_()
    left_alone(weight, "mapped or shared")


def test_other_strides_and_meta_are_left_alone():
    left_alone(nn.Parameter(torch.randn(10, 6, 4).permute(2, 1, 0)[:, ::2]), "not contiguous")
    assert "no storage" in why_not_in_place(nn.Parameter(torch.empty(2, 3, 4, device="meta")))


def test_what_is_left_alone_is_served_all_the_same():
    model = zoo.build("gpt_oss").model
    inputs = zoo.inputs_of(model)
    wanted = zoo.outputs(model, inputs)
    kept = model.state_dict()
    values = {name: t.clone() for name, t in kept.items()}
    accelerate(model)
    assert {entry.layout for entry in served(model)} == {"strided (another tensor uses the same storage)"}
    torch.testing.assert_close(zoo.outputs(model, inputs), wanted, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(kept[name], value) for name, value in values.items())


def test_tied_parameters_are_turned_once():
    model = zoo.build("gpt_oss").model
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    wanted = zoo.outputs(model, zoo.inputs_of(model))
    accelerate(model)
    assert second.down_proj is first.down_proj
    torch.testing.assert_close(zoo.outputs(model, zoo.inputs_of(model)), wanted, rtol=1e-5, atol=1e-5)


def interrupt_at(step, error):
    """A trace function that raises `error` at the given bytecode instruction of make_k_contiguous."""
    left = itertools.count()

    def trace(frame, event, _):
        if frame.f_code is not make_k_contiguous.__code__:
            return None
        frame.f_trace_opcodes = True  # and lines too: from Python 3.12 on there are no opcodes without them
        if event == "opcode" and next(left) == step:
            raise error
        return trace

    return trace


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError, MemoryError])
def test_an_exception_at_any_instruction_leaves_the_values(error):
    before = sys.gettrace()
    sys.settrace(interrupt_at(-1, error))  # Python 3.12 tells of no instruction in the first call that it traces
    make_k_contiguous(parameter((3, 2, 5)))
    sys.settrace(before)
    for step in itertools.count():
        weight = parameter((3, 2, 5))
        value, before = weight.detach().clone(), sys.gettrace()
        sys.settrace(interrupt_at(step, error))
        try:
            make_k_contiguous(weight)
        except error:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(before)
        assert torch.equal(weight, value), step
        if not interrupted:
            break
    assert step > 100
    assert is_k_contiguous(weight)


def test_an_inference_tensor_is_left_alone():
    with torch.inference_mode():
        weight = nn.Parameter(parameter().detach().clone(), requires_grad=False)
    left_alone(weight, "it is an inference tensor")


def test_what_is_computed_from_a_parameter_is_left_alone():
    assert "computed" in why_not_in_place(parameter() * 2)


def test_two_threads_first_call_settles_once(monkeypatch):
    module = zoo.build("gpt_oss").model.model.layers[0].mlp.experts
    right, calls = experts.make_k_contiguous, []
    meet = threading.Barrier(2)

    def slow(weight):
        calls.append(1)
        threading.Event().wait(0.05)
        return right(weight)

    def first_call():
        meet.wait()
        experts.plan_of(module)

    monkeypatch.setattr(experts, "make_k_contiguous", slow)
    threads = [threading.Thread(target=first_call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 2  # gate_up_proj and down_proj
