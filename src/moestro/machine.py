"""What this machine is, and how fast it can possibly be: its memory bandwidth and its matmul rate, measured."""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from moestro import settings

_ROOT = Path("/")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_PROBE_BYTES = 1 << 30
_SEGMENTS = 4
_SECONDS_PER_PROBE = 0.1
_MOST_CALLS = 64
_MOST_SECONDS_OF_A_PRODUCT = 0.25
_SECONDS_PER_TRIP = 0.01
_SECONDS_PER_PEAK = 0.1
_DEVICE_SIDES = (4096, 8192)
_X86_FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16")
_NEWER_X86_FEATURES = ("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme")

_LIMITS = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
"""By version: the files of limits, that of the bytes in use, and what of these is cached and given back when asked."""


@dataclass(frozen=True)
class Roof:
    """The fastest this machine was seen to read memory that no cache holds, and to multiply large matrices of a dtype.

    A multiply-add counts two floating-point operations.
    """

    bytes_per_second: float
    flops_per_second: float

    @property
    def balance(self) -> float:
        """FLOP per byte at which reading and computing take equally long."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time for work that needs both: reading overlaps computing perfectly."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


def measure(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Roof:
    """Measure the roof now; one to two seconds.

    Bandwidth is the best of a float32 sum, a float32 matrix-vector product and a bfloat16 one (on an accelerator also
    a copy, which counts both ways) over parts of a buffer of `probe_bytes`, each part read again only after all the
    others. FLOP/s is the best of square matmuls of several sizes; on a CPU a 16-bit dtype also counts what float32
    reaches, since its values can be widened.
    """
    device = torch.device(device)
    dtypes = {dtype, torch.float32} if device.type == "cpu" and dtype.itemsize == 2 else {dtype}
    with torch.inference_mode():
        return Roof(max(bandwidths(device).values()), max(_matmul_rate(d, device) for d in dtypes))


def roof(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Roof:
    """`measure`, once per process, dtype, device and number of PyTorch threads."""
    return _roof(dtype, str(device), torch.get_num_threads())


@cache
def _roof(dtype: torch.dtype, device: str, num_threads: int) -> Roof:
    return measure(dtype, device)


def peaks() -> dict[str, float]:
    """Operations per second from registers, of all of PyTorch's threads at once; measured now.

    A multiply-add counts two. Each is the best of several runs of a loop of one instruction on independent
    accumulators. Keys, of which those are there that the processor has: "fma" (float32), "vnni" (int8 dot products in
    vectors), "amx-bf16" and "amx-int8" (tiles). Empty without the native engine, and on processors other than x86-64.
    """
    try:
        native: Any = importlib.import_module("moestro._native")
    except ImportError:
        return {}
    found: dict[str, float] = native.peaks(torch.get_num_threads(), _SECONDS_PER_PEAK)
    return found


def round_trip() -> float | None:
    """Seconds that a cache line takes from one of PyTorch's threads to another and back, now; the longest of them.

    Where a host moves the processors of a virtual machine, it says whether they share a cache: rates of memory and
    times of layers differ by it. Measured for 10 ms, for up to 0.2 s where it is over a microsecond, as between threads
    that share a core. None without the native engine, and for one thread.
    """
    try:
        native: Any = importlib.import_module("moestro._native")
    except ImportError:
        return None
    found: float = native.round_trip(torch.get_num_threads(), _SECONDS_PER_TRIP)
    return found or None


def matrix_rates(device: torch.device | str) -> dict[str, float]:
    """FLOP/s of large square matrix products on a CUDA device, measured now.

    Keys: "bf16-mm" (torch.mm) and, from compute capability 8.9 on, "fp8-mm" (torch._scaled_mm of float8_e4m3fn with
    one scale for each matrix, out in bfloat16). Empty for devices of other types.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    with torch.inference_mode():
        rates = {"bf16-mm": _matmul_rate(torch.bfloat16, device)}
        if torch.cuda.get_device_capability(device) >= (8, 9):
            rates["fp8-mm"] = max(_fp8_rate(n, device) for n in _DEVICE_SIDES)
    return rates


def describe_gpu(device: torch.device | str) -> dict[str, Any]:
    """A CUDA device in values that JSON can hold: name, capability, multiprocessors, memory_bytes, l2_bytes."""
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
    }


def probe_bytes(device: torch.device | str = "cpu") -> int:
    """Size of the buffer behind the bandwidth probe: 1 GiB, or a quarter of the free memory if that is less."""
    return max(min(_PROBE_BYTES, available_bytes(device) // 4) // 2**20 * 2**20, 2**24)


def bandwidths(device: torch.device | str) -> dict[str, float]:
    """Bytes per second of each probe: "sum", "float32 rows" and "bfloat16 rows" (matrix-vector products), which read,
    and on an accelerator "copy", which counts reading and writing."""
    device = torch.device(device)
    parts = torch.empty(probe_bytes(device) // 4, device=device).fill_(1e-3).chunk(_SEGMENTS)
    vector = torch.full((4096,), 0.5, device=device)
    short = vector.bfloat16()
    probes: dict[str, tuple[int, Callable[[Tensor], object]]] = {
        "sum": (1, torch.sum),
        "float32 rows": (1, lambda part: part.view(-1, 4096) @ vector),
        "bfloat16 rows": (1, lambda part: part.view(torch.bfloat16).view(-1, 4096) @ short),
    }
    if device.type != "cpu":
        probes["copy"] = (2, torch.empty_like(parts[0]).copy_)
    order = itertools.cycle(parts)
    part_bytes = parts[0].numel() * parts[0].element_size()
    return {
        name: transfers * part_bytes / min(_timings(lambda probe=probe: probe(next(order)), device))  # type: ignore[misc]
        for name, (transfers, probe) in probes.items()
    }


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    best = 0.0
    for n in (256, 1024, 2048) if device.type == "cpu" else _DEVICE_SIDES:
        if best and 2 * n**3 / best > _MOST_SECONDS_OF_A_PRODUCT:
            break  # few cores, or a dtype for which the processor has no instructions
        a, b = (torch.randn((n, n), device=device).mul_(0.01).to(dtype) for _ in range(2))
        best = max(best, 2 * n**3 / min(_timings(partial(torch.mm, a, b), device)))
    return best


def _fp8_rate(n: int, device: torch.device) -> float:
    a, b = (torch.randn((n, n), device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    product = partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return 2 * n**3 / min(_timings(product, device))


def _timings(call: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of repeated calls, a first one aside: at least two, then for as long as the budget lasts."""
    call()
    times: list[float] = []
    while len(times) < 2 or (sum(times) < _SECONDS_PER_PROBE and len(times) < _MOST_CALLS):
        times.append(_seconds(call, device))
    return times


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    module = torch.get_device_module(device)
    start_event, end_event = module.Event(enable_timing=True), module.Event(enable_timing=True)
    module.synchronize()
    start_event.record()
    call()
    end_event.record()
    module.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1e3


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds(root: Path = _ROOT) -> float | None:
    """Processor seconds that all programs, and the machine's host, have taken since it started; None if not told."""
    words = _read(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:9]]  # user, nice, system, idle, waiting, interrupts (two), stolen
    return float(sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """Processor, its features, threads, caches, memory and accelerators, in values that JSON can hold.

    Keys: processor, architecture, features, masked_features, torch_kernels (the set that PyTorch's own are for), cores,
    threads, cache_bytes (name -> bytes), memory_bytes, memory_available_bytes, probe_bytes, accelerators, system.
    """
    return {
        "processor": processor_name(),
        "architecture": platform.machine(),
        "features": features(),
        "masked_features": list(settings.MASKED),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(),
        "memory_bytes": _physical_bytes(),
        "memory_available_bytes": available_bytes(),
        "probe_bytes": probe_bytes(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(terse=True),
    }


def available_bytes(device: torch.device | str = "cpu", root: Path = _ROOT) -> int:
    """Bytes that can be allocated now: free device memory, or what the kernel and every limit leave on a CPU.

    `root` is the folder that holds proc and sys.
    """
    device = torch.device(device)
    if device.type != "cpu":
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free)
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"))
    free = int(found[1]) * 1024 if found else _physical_bytes() // 2
    return min([free, *(limit.left_bytes for limit in limits(root))])


def memory_bytes(root: Path = _ROOT) -> int:
    """Bytes that this process could hold: the machine's memory, or the least limit of its control groups."""
    return min([_physical_bytes(), *(limit.limit_bytes for limit in limits(root))])


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_bytes() -> dict[str, int]:
    """Sizes of the caches the first core sees ("L2" -> bytes; "L1d" and "L1i"), where the system tells."""
    sizes: dict[str, int] = {}
    for folder in sorted(_CACHES.glob("index*")):
        level, kind, size = (_read(folder / name).strip() for name in ("level", "type", "size"))
        found = re.fullmatch(r"(\d+)([KM]?)", size)
        if found and level:
            suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
            sizes[f"L{level}{suffix}"] = int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]]
    return sizes


def processor_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def features() -> list[str]:
    """The instruction sets that matter to matmuls, of those the processor lists."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    listed = set(found[1].split()) if found else set()
    return [name for name in (*_X86_FEATURES, *_NEWER_X86_FEATURES, *_ARM_FEATURES) if name in listed]


@dataclass(frozen=True)
class Limit:
    """The most that the processes of one control group may hold, and what of it they do not hold now.

    Cached files that nobody is using count as left.
    """

    limit_bytes: int
    left_bytes: int


def limits(root: Path = _ROOT) -> list[Limit]:
    """The memory limits of this process's control groups, versions 1 and 2, and of all of their ancestors."""
    return [found for folder, version in _groups(root) if (found := _limit(folder, *_LIMITS[version])) is not None]


def _limit(folder: Path, names: tuple[str, ...], used_name: str, cached_name: str) -> Limit | None:
    numbers = [int(text) for name in names if (text := _read(folder / name).strip()).isdecimal()]
    used = _read(folder / used_name).strip()
    if not numbers or not used.isdecimal():
        return None
    cached = re.search(rf"^{cached_name} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    held = max(int(used) - (int(cached[1]) if cached else 0), 0)
    return Limit(min(numbers), max(min(numbers) - held, 0))


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """The folders of this process's groups that can limit memory, and those of their ancestors; their version."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        in_version_1 = "memory" in controllers.split(",")
        if not in_version_1 and hierarchy != "0":
            continue
        version = "cgroup" if in_version_1 else "cgroup2"
        for mounted, mount_point in _mounts(root, version):
            # A container may see less of the hierarchy than the path names.
            group = PurePosixPath(path)
            seen = ".." not in group.parts and group.is_relative_to(mounted)
            inside = group.relative_to(mounted) if seen else PurePosixPath()
            for folder in (inside, *inside.parents):
                yield root / str(mount_point / folder).lstrip("/"), version


def _mounts(root: Path, version: str) -> Iterator[tuple[str, PurePosixPath]]:
    """Which part of the hierarchy lies where, of each place where it is mounted."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        own, other = before.split(), after.split()
        if len(own) < 5 or not other or other[0] != version:
            continue
        if version == "cgroup2" or "memory" in other[-1].split(","):
            part, place = (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text) for text in own[3:5])
            yield part, PurePosixPath(place)


def _read(path: Path) -> str:
    """What a file of the system says; "" where it says nothing."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
