"""Libraries that are missing, names that are replaced, and that allgrad imports none of them."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from allgrad.integrations._library import needs, replaced

ROOT = Path(__file__).parent.parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# module of ours: the library it imports, and its extra
LIBRARIES = {
    "accelerate": ("accelerate", "accelerate"),
    "colpali": ("colpali_engine", "colpali"),
    "lightly": ("lightly", "lightly"),
    "lightning": ("lightning", "lightning"),
    "open_clip": ("open_clip", "open-clip"),
    "pylate": ("pylate", "pylate"),
    "pytorch_metric_learning": ("pytorch_metric_learning", "pytorch-metric-learning"),
    "sentence_transformers": ("sentence_transformers", "sentence-transformers"),
    "torchmetrics": ("torchmetrics", "torchmetrics"),
}


def test_every_module_of_a_library_has_an_extra():
    folder = ROOT / "src" / "allgrad" / "integrations"
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(LIBRARIES)
    assert {extra for _, extra in LIBRARIES.values()} <= EXTRAS.keys()


def test_allgrad_imports_no_library():
    script = "import allgrad, allgrad.integrations, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    )
    assert not {library for library, _ in LIBRARIES.values()} & set(done.stdout.split())


@pytest.mark.parametrize("name", sorted(LIBRARIES.keys() - {"torchmetrics"}))
def test_a_missing_library_is_named_with_its_extra(name):
    library, extra = LIBRARIES[name]
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed")
    with pytest.raises(ImportError, match=rf"{library}(.|\n)*allgrad\[{extra}\]"):
        importlib.import_module(f"allgrad.integrations.{name}")


def test_an_import_that_fails_names_the_extra():
    with pytest.raises(ImportError, match=r"no_such_library(.|\n)*allgrad\[it\]"), needs("it"):
        import no_such_library  # noqa: F401


def test_names_are_replaced_inside_the_block_only():
    class Owner:
        def of_class(self):
            return "class"

    owner = Owner()
    owner.own = "own"
    with pytest.raises(KeyError), replaced(owner, own=1, of_class=lambda: 2):
        _raise_after(owner)
    assert (owner.own, owner.of_class(), vars(owner)) == ("own", "class", {"own": "own"})


def _raise_after(owner):
    assert (owner.own, owner.of_class()) == (1, 2)
    raise KeyError


def test_a_name_that_is_not_there_raises():
    owner = SimpleNamespace(own=1)
    with pytest.raises(AttributeError), replaced(owner, own=2, other=3):
        pass
    assert owner.own == 1
