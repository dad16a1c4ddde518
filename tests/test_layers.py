"""The house: imports point strictly down, and only the wire talks to torch.distributed."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "allgrad"

# From the bottom up; a module may import what stands on a lower line, or beside it in its layer
# where the layer is marked so.
LAYERS = [
    ["errors"],
    [
        "departures",
        "ragged",
        "reductions",
        "containers",
        "container_kinds",
        "call_arguments",
        "journal",
    ],
    ["plans", "graph_wire", "groups"],
    ["waiting"],
    ["peers"],
    ["moves"],
    ["wire", "world"],
    ["agreement"],
    ["checking"],
    ["adjoint_pair", "device_pairs"],
    ["transforms"],
    ["backward_order"],
    ["flights"],
    ["lockstep"],
    ["collectives"],
    ["devices"],
    ["module_state", "losses"],
    ["compat"],
    ["testing", "report"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
BESIDE = {
    "containers",
    "container_kinds",
    "call_arguments",
    "wire",
    "collectives",
    "testing",
    "cli",
}
NEVER = {
    # The calculus never sees the wire.
    "adjoint_pair": {"wire", "moves", "peers", "world", "agreement", "plans"},
    "transforms": {"wire", "moves", "peers", "world", "agreement", "plans"},
    "backward_order": {"wire", "moves", "peers", "world", "agreement", "plans"},
    "flights": {"wire", "moves", "peers", "world", "agreement", "plans"},
}


def level(name):
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imported(path):
    """The allgrad modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "allgrad":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("allgrad."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("allgrad."))


FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path):
    own = path.relative_to(SRC).parts[0].removesuffix(".py")
    known = {name for layer in LAYERS for name in layer}
    assert own in known, f"{own} has no place in the house"
    for name in imported(path):
        if name not in known:  # a public name of allgrad itself
            assert level(own) > level("collectives"), f"{path} imports {name} from the top"
            continue
        assert name not in NEVER.get(own, set()), f"{own} must not know {name}"
        below = level(name) < level(own)
        beside = name == own or (level(name) == level(own) and {name, own} <= BESIDE)
        assert below or beside, f"{own} imports {name}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_wire_talks_to_torch_distributed(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    users = {"groups.py", "moves.py", "world.py", "cli/bench/ways.py", "cli/bench/by_hand.py"}
    assert path.relative_to(SRC).as_posix() in users or not any(
        n.startswith("torch.distributed") for n in names
    )


def test_files_stay_small():
    long = {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long
