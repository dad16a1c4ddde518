"""The house: imports point strictly down, and only the wire talks to torch.distributed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "allgrad"

# From the bottom up: a package imports itself and the packages above its own line.
PACKAGES = (
    *("errors", "containers", "_core", "_wire", "_autograd", "types", "collectives", "devices"),
    *("module_state", "wrappers", "losses", "nn", "compat", "integrations", "testing", "report"),
    *("cli", "__main__"),
)
# Differentiation knows nothing of how bytes move; only lockstep tells other ranks of an error.
CALCULUS = {"adjoint_pair.py", "transforms.py", "backward_order.py", "async_calls.py"}
# The packages inside losses, from the bottom up.
INSIDE_LOSSES = ("_tiles", "_arguments", "_pairs", "_rows", "_graphs")
BASELINES = {"cli/bench/baselines.py", "cli/bench/algorithms.py"}


def imported(path, within="allgrad"):
    """What a file imports from a package: its modules and packages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == within:
                yield from (alias.name for alias in node.names)
            elif node.module.startswith(f"{within}."):
                yield node.module.removeprefix(f"{within}.").split(".")[0]
        elif isinstance(node, ast.Import):
            names = (a.name for a in node.names if a.name.startswith(f"{within}."))
            yield from (name.removeprefix(f"{within}.").split(".")[0] for name in names)


FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path):
    own = path.relative_to(SRC).parts[0].removesuffix(".py")
    assert own in PACKAGES, f"{own} has no place in the house"
    for name in imported(path):
        assert name in PACKAGES, f"{path} imports {name} from the top of the package"
        assert PACKAGES.index(name) <= PACKAGES.index(own), f"{own} imports {name} above it"
        assert not (name == "_wire" and own == "_autograd" and path.name in CALCULUS)


@pytest.mark.parametrize("package", INSIDE_LOSSES)
def test_imports_inside_losses_point_down(package):
    below = INSIDE_LOSSES[: INSIDE_LOSSES.index(package)]
    files = sorted((SRC / "losses" / package).glob("*.py"))
    assert files
    found = {name for path in files for name in imported(path, "allgrad.losses")}
    assert {*INSIDE_LOSSES} & found <= {*below, package}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_wire_talks_to_torch_distributed(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    inside = path.relative_to(SRC).as_posix()
    if inside == "_core/torch_internals.py":  # looked up for allgrad bench, when it asks
        names = [name for name in names if name != "torch.distributed"]
    assert (
        inside.startswith("_wire/")
        or inside in BASELINES
        or not any(n.startswith("torch.distributed") for n in names)
    )


@pytest.mark.parametrize("package", [p.parent for p in FILES if p.name == "__init__.py"])
def test_a_package_says_what_it_holds_and_imports(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    assert 2 <= len(text.splitlines()) <= 5, f"{package}: say what it holds, and what it imports"
    if package.parent == SRC:
        said = {*re.findall(r"``(\w+)``", text.partition("Imports ")[2])}
        found = {name for path in package.rglob("*.py") for name in imported(path)}
        assert said == found - {package.name}


TESTS = Path(__file__).parent
CROSS_CUTTING = {"modes", "faults", "fuzz"}  # test directories that belong to no single package


def test_tests_mirror_the_source():
    directories = {p.parent.relative_to(TESTS) for p in TESTS.rglob("test_*.py")}
    strays = [
        str(d) for d in directories if not (SRC / d).is_dir() and d.parts[0] not in CROSS_CUTTING
    ]
    assert not strays, "a test directory has the name of the package that it tests"


def test_files_stay_small():
    long = {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def private_names_of_torch(path):
    """Names with a leading underscore that a file takes from torch, or from objects of torch."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if part.startswith("_"))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield from (part for part in alias.name.split(".") if part.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root = node.value
            while isinstance(root, (ast.Attribute, ast.Call)):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            own = isinstance(root, ast.Name) and root.id in {"self", "cls", "sys", "other", "super"}
            if not own and not node.attr.startswith("__"):
                yield node.attr


# Private names of our own, or of the standard library, that another object of ours is asked for.
OWN = {
    "_replace",
    "_chain",
    "_fields",
    "_asdict",
    "_exit",
    "_finish",
    "_result",
    "_metadata",
    "_make",
    "_take",
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_private_names_of_torch_stand_in_one_place(path):
    if path not in {
        SRC / "_core" / f"{name}_internals.py" for name in ("torch", "module", "graph")
    }:
        assert set(private_names_of_torch(path)) <= OWN


IMPORT = """
import sys, time
began = time.perf_counter()
import torch
torch_took, before = time.perf_counter() - began, set(sys.modules)
began = time.perf_counter()
import allgrad
print(torch_took, time.perf_counter() - began)
print(*sorted(set(sys.modules) - before))
import allgrad.cli.main, allgrad.losses, allgrad.nn
print(*sorted(set(sys.modules) - before))
"""
LATE = ("torch._dynamo", "torch._inductor", "triton", "sympy", "optree.integrations.torch")
GRAPHS = "allgrad._autograd.graph_ops"


def test_import_loads_no_compiler_and_no_graph_code():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=100
    )
    loaded = done.stdout.splitlines()[1].split()
    assert "allgrad.collectives.all_gather" in loaded
    assert not [name for name in loaded if name == GRAPHS or name.startswith(LATE)]
    more = done.stdout.splitlines()[2].split()  # 80 MB and a second, for nothing
    assert {"allgrad.losses.clip", "allgrad.nn.experts"} <= set(more)
    assert not [name for name in more if name.startswith(LATE)]


def test_packages_are_imported_when_asked_for(monkeypatch):
    import allgrad
    import allgrad.nn

    monkeypatch.delattr(allgrad, "nn")
    assert allgrad.nn is sys.modules["allgrad.nn"]
    assert not hasattr(allgrad, "loses")
