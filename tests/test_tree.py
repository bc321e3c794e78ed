"""The shape of the source: operation folders, sizes of files, functions and signatures, and what no module may do."""

from __future__ import annotations

import ast
import statistics

import pytest

from source import MODULES, PACKAGE, ROOT, Function, Source, functions

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
OP_FILES = ("__init__.py", "reference.py", "plain.py", "tuning.py")
OPS = sorted(p.name for p in (PACKAGE / "ops").iterdir() if p.is_dir() and not p.name.startswith("_"))
PYTHON = sorted(p for d in ("src", "tests", "benchmarks", "examples", "tools") for p in (ROOT / d).rglob("*.py"))


@pytest.mark.parametrize("op", OPS)
def test_every_operation_has_its_files(op: str) -> None:
    needed = [PACKAGE / "ops" / op / name for name in OP_FILES]
    needed += [ROOT / "tests" / "ops" / f"test_{op}.py", ROOT / "docs" / "reference" / f"{op}.md"]
    assert [str(p.relative_to(ROOT)) for p in needed if not p.is_file()] == []


def test_every_operation_is_benchmarked() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "registry.py").read_text(encoding="utf-8"))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(OPS) - strings == set()


def test_every_operation_is_registered() -> None:
    import moestro  # noqa: F401  (importing it registers them)
    from moestro.ops import dispatch

    assert {op.name for op in dispatch.operations()} == {*OPS, "route"}  # routers stand above the operations
    for op in dispatch.operations():
        names = [entry.name for entry in op.implementations]
        assert len(set(names)) == len(names)
        assert names


def test_files_stay_short() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in PYTHON}
    assert {path: n for path, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {name}": (node.end_lineno or 0) - node.lineno + 1
        for path in PYTHON
        for name, node, _ in functions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def parameters(node: Function, method: bool) -> int:
    """Parameters a caller meets: neither self nor cls, nor the device= and dtype= that every torch module takes."""
    of_torch = {"device", "dtype"} if node.name == "__init__" else set()
    by_name = [a for a in node.args.kwonlyargs if a.arg not in of_torch]
    arguments = [*node.args.posonlyargs, *node.args.args, *by_name]
    own = method and bool(arguments) and arguments[0].arg in ("self", "cls")
    return len(arguments) - own


def public(name: str) -> bool:
    return not any(word.startswith("_") and word != "__init__" for word in name.split("."))


def is_command(node: Function) -> bool:
    """A command: its parameters are options of the command line, which has no value objects."""
    return any(a.annotation is not None and "typer." in ast.unparse(a.annotation) for a in node.args.args)


def is_kernel(node: Function) -> bool:
    """Device code: its parameters are pointers, sizes and values that it is compiled for, one by one."""
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def signatures(module: Source) -> dict[str, int]:
    return {
        f"{module.name}.{name}": parameters(node, method)
        for name, node, method in functions(module.tree)
        if public(name) and not is_command(node) and not is_kernel(node)
    }


def test_public_signatures_stay_small() -> None:
    counts = {k: n for module in MODULES if public(module.name) for k, n in signatures(module).items()}
    assert {k: n for k, n in counts.items() if n > MAX_PARAMETERS} == {}
    assert statistics.median(counts.values()) <= 3


def handed_on(node: ast.ExceptHandler) -> bool:
    """Whether a method that is called inside gets the error that was caught."""
    calls = (inner for statement in node.body for inner in ast.walk(statement) if isinstance(inner, ast.Call))
    methods = [call for call in calls if isinstance(call.func, ast.Attribute)]
    given = (a for call in methods for a in (*call.args, *(keyword.value for keyword in call.keywords)))
    return any(isinstance(a, ast.Name) and a.id == node.name for a in given)


def test_no_wide_net() -> None:
    """`except ImportError` is the widest net around an optional part; nothing swallows whatever comes.

    What is caught may be raised again, or handed by name to whoever waits for it.
    """
    wide = [
        f"{module.where}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or {"Exception", "BaseException"} & {n.id for n in ast.walk(node.type) if name(n)})
        and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)  # cleaned up, and raised again
        and not handed_on(node)
    ]
    assert wide == []


def name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def test_only_commands_print() -> None:
    printed = [
        f"{module.where}:{node.lineno}"
        for module in MODULES
        if not module.name.startswith("moestro.cli") and "__main__" not in module.text
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printed == []


def test_modules_and_public_functions_have_docstrings() -> None:
    assert [module.where for module in MODULES if not ast.get_docstring(module.tree)] == []
    of_a_family = "moestro.hf.families."  # the three functions of every family do what `Adapter` says of them
    bare = [
        f"{module.where}:{node.lineno} {n}"
        for module in MODULES
        if public(module.name) and not module.name.startswith(of_a_family)
        for n, node, method in functions(module.tree)
        if public(n) and not method and "." not in n and not ast.get_docstring(node)
    ]
    assert bare == []


def test_nothing_is_left_to_do() -> None:
    marks = ["TO" + "DO", "FIX" + "ME", "XX" + "X"]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PYTHON}
    assert [(path, mark) for path, text in texts.items() for mark in marks if mark in text] == []
