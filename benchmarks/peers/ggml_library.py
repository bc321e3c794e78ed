"""The functions of ggml that the peer calls, through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from peers import installed

LIBRARIES = ("libggml-base.so", "libggml-cpu.so")
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "q4_K": 12, "bf16": 30, "mxfp4": 39}
"""Codes of ggml's types."""

_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
_P, _I64, _SIZE, _F32, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float, ctypes.c_int


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


class PoolParams(ctypes.Structure):
    """ggml_threadpool_params; the mask has GGML_MAX_N_THREADS entries."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", _INT),
        ("prio", _INT),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


# name -> result, arguments; of those in libggml-base
_BASE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_log_set": (None, (_P, _P)),
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead": (_SIZE, ()),
    "ggml_new_tensor_2d": (_P, (_P, _INT, _I64, _I64)),
    "ggml_new_tensor_3d": (_P, (_P, _INT, _I64, _I64, _I64)),
    "ggml_view_2d": (_P, (_P, _P, _I64, _I64, _SIZE, _SIZE)),
    "ggml_view_3d": (_P, (_P, _P, _I64, _I64, _I64, _SIZE, _SIZE, _SIZE)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_add_id": (_P, (_P, _P, _P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_cont": (_P, (_P, _P)),
    "ggml_swiglu": (_P, (_P, _P)),
    "ggml_swiglu_oai": (_P, (_P, _P, _P, _F32, _F32)),
    "ggml_set_input": (None, (_P,)),
    "ggml_set_output": (None, (_P,)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_quantize_chunk": (_SIZE, (_INT, _P, _P, _I64, _I64, _I64, _P)),
    "ggml_row_size": (_SIZE, (_INT, _I64)),
    "ggml_blck_size": (_I64, (_INT,)),
    "ggml_nbytes": (_SIZE, (_P,)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_free": (None, (_P,)),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_P,)),
    "ggml_backend_get_default_buffer_type": (_P, (_P,)),
    "ggml_backend_get_device": (_P, (_P,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
    "ggml_backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_tensor_get": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_graph_compute": (_INT, (_P, _P)),
    "ggml_backend_free": (None, (_P,)),
    "ggml_threadpool_params_init": (None, (ctypes.POINTER(PoolParams), _INT)),
}
_CPU: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _INT)),
    "ggml_backend_cpu_set_threadpool": (None, (_P, _P)),
    "ggml_threadpool_new": (_P, (ctypes.POINTER(PoolParams),)),
    "ggml_threadpool_free": (None, (_P,)),
    "ggml_cpu_has_avx2": (_INT, ()),
}


class Library:
    """Both shared libraries, their functions by their names without "ggml_"."""

    def __init__(self, folder: Path) -> None:
        base, cpu = (ctypes.CDLL(str(folder / name)) for name in LIBRARIES)
        for library, functions in ((base, _BASE), (cpu, _CPU)):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)
        self.log_set(ctypes.cast(_QUIET, _P), None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self, num_tensors: int) -> int:
        """A place for the descriptions of so many tensors and of a graph."""
        size = num_tensors * self.tensor_overhead() + self.graph_overhead()
        return int(self.init(InitParams(size, None, True)))

    def repacking(self, backend: int) -> int | None:
        """The buffer type whose weights are rearranged for this processor, if ggml has one."""
        register = self.backend_dev_backend_reg(self.backend_get_device(backend))
        address = self.backend_reg_get_proc_address(register, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(self.backend_get_device(backend))
        index = 0
        while listed[index]:
            if self.backend_buft_name(listed[index]) == b"CPU_REPACK":
                return int(listed[index])
            index += 1
        return None


class Engine:
    """ggml's CPU backend with a team of threads of its own, as many as PyTorch has."""

    def __init__(self, library: Library) -> None:
        self.library, threads = library, torch.get_num_threads()
        params = PoolParams()
        library.threadpool_params_init(ctypes.byref(params), threads)
        self.pool = library.threadpool_new(ctypes.byref(params))
        self.backend = library.backend_cpu_init()
        library.backend_cpu_set_n_threads(self.backend, threads)
        library.backend_cpu_set_threadpool(self.backend, self.pool)


@cache
def library() -> Library:
    """The installed libraries."""
    return Library(installed.path("ggml"))


@cache
def engine(num_threads: int) -> Engine:
    """The one engine of this process for so many threads."""
    assert num_threads == torch.get_num_threads()
    return Engine(library())
