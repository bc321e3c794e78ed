"""What users import: which names, at what cost, and with what missing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest

import moestro
from source import MODULES, PACKAGE, ROOT, Source

PUBLIC = {
    "Activation",
    "ExpertWeights",
    "Experts",
    "FFN",
    "GroupLimitedRouter",
    "MoE",
    "MoestroError",
    "Routing",
    "Scoring",
    "SharedExperts",
    "TopKRouter",
    "__version__",
    "accelerate",
    "block_schedule",
    "expert_mlp",
    "explain",
    "group_by_expert",
    "load",
    "plan",
    "profile",
    "topk",
    "use",
}
SUBMODULES = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
ENVIRONMENT = {
    "MOESTRO_API_KEY",
    "MOESTRO_BENCH_PEERS",
    "MOESTRO_IMPLEMENTATION",
    "MOESTRO_MEASURE",
    "MOESTRO_STRATEGY",
    "MOESTRO_WITHOUT_FEATURES",
}
IMPORT_SECONDS = 0.3
OPTIONAL = ("transformers", "triton", "typer", "rich", "matplotlib", "safetensors")


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_public_names_are_frozen() -> None:
    assert set(moestro.__all__) == PUBLIC
    assert len(moestro.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(moestro, name) is not None


def test_public_names_are_documented() -> None:
    for name in PUBLIC - {"__version__"}:
        assert (getattr(moestro, name).__doc__ or "").strip(), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = moestro.no_such_name  # type: ignore[attr-defined]


def test_one_version() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert moestro.__version__ == declared
    assert f"[{declared}]" in (ROOT / "CHANGELOG.md").read_text()


def test_names_are_listed() -> None:
    """Completion in an interpreter offers what loads on use too, and nothing that only the module itself needs."""
    listed = dir(moestro)
    assert set(listed) >= PUBLIC
    assert [name for name in listed if not name.startswith("_") and name not in PUBLIC | SUBMODULES] == []


def test_the_package_is_typed() -> None:
    """A user's file is checked with the package, strictly: what it ignores on purpose has to be a mistake."""
    assert (PACKAGE / "py.typed").is_file()
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/typed_user.py" in checked["files"]
    assert checked["strict"] is True
    assert "warn_unused_ignores" not in checked  # of strict
    assert "  # type: ignore[call-arg]" in (ROOT / "tests" / "typed_user.py").read_text()


def test_works_without_optional_parts() -> None:
    code = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import torch, moestro
x = torch.randn(5, 8)
layer = moestro.FFN(8, 16, num_experts=4, top_k=2)
assert layer(x).shape == x.shape
print(layer(x).sum().item() == layer(x).sum().item())
try:
    moestro.accelerate
except ImportError as error:
    print("refused:", error)
"""
    out = python(code)
    assert out.startswith("True\n")
    assert "refused:" in out


def test_importing_loads_no_optional_part() -> None:
    code = "import sys, torch; before = set(sys.modules); import moestro; print(*(set(sys.modules) - before))"
    assert set(python(code).split()) & set(OPTIONAL) == set()


def test_import_time() -> None:
    """The one law on time: one of several processes, each timing the import after torch's own, in CPU seconds."""
    code = "import time, torch; t = time.process_time(); import moestro; print(time.process_time() - t)"
    assert any(float(python(code, PYTHONDONTWRITEBYTECODE="")) < IMPORT_SECONDS for _ in range(4))


def reads_environment(module: Source) -> list[str]:
    return [
        f"{module.where}:{node.lineno}"
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"))
        or (isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & {"environ", "getenv", "putenv"})
    ]


def test_only_settings_reads_the_environment() -> None:
    readers = {m.name for m in MODULES if reads_environment(m)}
    assert readers == {"moestro.settings"}


def test_environment_variables_are_frozen_and_documented() -> None:
    strings = {
        node.value
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("MOESTRO_[A-Z_]+", node.value)
    }
    assert strings == ENVIRONMENT
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert set(re.findall("MOESTRO_[A-Z_]+", page)) == ENVIRONMENT


@pytest.mark.parametrize(
    ("variable", "value"), [("MOESTRO_STRATEGY", "selective"), ("MOESTRO_IMPLEMENTATION", "reference")]
)
def test_environment_variables_take_effect(variable: str, value: str) -> None:
    field = variable.removeprefix("MOESTRO_").lower()
    assert (
        python(f"from moestro import settings; print(settings.current().{field})", **{variable: value}).strip() == value
    )
