"""What only `remat._compat` may name: whatever of torch begins with an underscore, and the keys of its tracers."""

from __future__ import annotations

import ast
import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

CLIENT = Path(__file__).parents[2] / "client"
SOURCES = sorted(p for p in (CLIENT / "remat").rglob("*.py") if "_compat" not in p.relative_to(CLIENT).parts)


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_of(*owners: object) -> set[str]:
    return {name for owner in owners for name in dir(owner) if _private(name)}


OF_MODULES = _private_of(nn.Module())
"""Of what modules of our own inherit, so that it stands on `self`."""
PRIVATE = OF_MODULES | {"_fsdp_use_orig_params"} | _private_of(torch.empty(0), torch.UntypedStorage)
PRIVATE |= _private_of(fx.Node, fx.Graph, fx.GraphModule, torch.ops.aten.add.Tensor, torch.autograd.Function)
"""Of all that the client handles, so that it is found in strings, too."""
RECORDS = {"_asdict", "_replace"}
"""Public by the documentation of `typing.NamedTuple`."""
OWN = {"self", "cls"}
DOCUMENTED = {"val"}
"""Keys of a node's metadata that the documentation of torch.export's IR names for everybody's use."""
KEYS = {"desc", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "saved_tensor_with_no_vc_check"}
"""Keys of a node's metadata that tracers use between them, wherever they stand."""


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Where a module names what is private to torch: the line, and the name, of an attribute of torch's in full.

    `torch._C._autograd._name` is one name.
    """
    beginnings = set[ast.expr]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            beginnings.add(node.value)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if any(map(_private, a.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            dotted = [f"{node.module}.{a.name}" for a in node.names]
            yield from ((node.lineno, name) for name in dotted if any(map(_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in RECORDS:
            ours = isinstance(node.value, ast.Name) and node.value.id in OWN and node.attr not in OF_MODULES
            if not ours and node not in beginnings:
                dotted = ast.unparse(node)
                yield node.lineno, dotted if dotted.startswith("torch.") else node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in PRIVATE | KEYS:
            yield node.lineno, node.value
        else:
            yield from ((node.lineno, key) for key in _keys(node) if key not in DOCUMENTED | KEYS)


def _keys(node: ast.AST) -> list[str]:
    """The literal keys by which an expression looks something up in a node's metadata."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Subscript) and _is_meta(node.value):
        found = [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_meta(node.func.value):
        found = node.args[:1]
    elif isinstance(node, ast.Compare) and any(map(_is_meta, node.comparators)):
        found = [node.left]
    return [key.value for key in found if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


COMPAT = sorted((CLIENT / "remat" / "_compat").rglob("*.py"))
LISTED = Path(__file__).with_name("private_names.tsv")
"""Each private name by the part of `_compat` that uses it: what for, and which public name would replace it."""


BUILT_ON_CORE = {"fake_cuda", "gradients", "inductor", "tags"}
"""The parts that the core of the client, as `pyproject.toml` says what that is, does not import."""


def _part(path: Path) -> str:
    found = path.relative_to(CLIENT / "remat" / "_compat").parts[0]
    return found.removesuffix(".py")


PARTS = set(map(_part, COMPAT))


def test_each_private_name_is_listed() -> None:
    """A new one has to be argued for, and one that is gone leaves the list."""
    rows = [line.split("\t") for line in LISTED.read_text().splitlines()[1:]]
    assert all(len(row) == 4 and all(row) for row in rows)
    found = {(_part(path), name) for path in COMPAT for _, name in private_names(path.read_text())}
    assert found == {(part, name) for part, name, *_ in rows}
    for parts, most in ((PARTS - BUILT_ON_CORE, 60), (PARTS - {"inductor"}, 76)):
        assert len({name for part, name in found if part in parts}) <= most


def absent() -> list[str]:
    """The names in full, such as `torch._guards.tracing`, that this torch does not have."""
    names = {name for path in COMPAT for _, name in private_names(path.read_text()) if name.startswith("torch.")}
    return sorted(name for name in names if not _is_there(name.split(".")))


def _is_there(parts: list[str]) -> bool:
    found: object = torch
    for i, part in enumerate(parts[1:], 2):
        with contextlib.suppress(ImportError):
            importlib.import_module(".".join(parts[:i]))
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


OF_SOME = {
    "torch._custom_class_base.CustomClassBase",  # later, in the place of the next but one
    "torch._library.opaque_object.register_custom_class",
    "torch._library.opaque_object.register_opaque_type",
    "torch._opaque_base.OpaqueBase",
    "torch.optim.optimizer._foreach_supported_types",
}
"""Names that some releases have, and others have others for."""


def test_what_a_release_lacks_is_found() -> None:
    assert not _is_there(["torch", "_no_such_part", "name"])
    assert set(absent()) <= OF_SOME


def test_private_names_are_in_one_place() -> None:
    """Outside of `_compat` the client names nothing that torch may rename tomorrow."""
    found = [
        f"{path.relative_to(CLIENT)}:{line}: {name}"
        for path in SOURCES
        for line, name in private_names(path.read_text())
    ]
    assert not found, "move it to client/remat/_compat: " + ", ".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "import torch._dynamo.config",
        "from torch._ops import OpOverload",
        "from torch import _inductor",
        "from torch.utils import _pytree as tree",
        "kernel = torch.ops.aten._to_copy.default",
        "isinstance(target, torch._C.ScriptFunction)",
        "before = given[0]._version",
        "target._schema.arguments",
        "part.__dict__['_parameters']",
        "getattr(module, '_forward_hooks')",
        "part.__dict__.get('_fsdp_use_orig_params')",
        "class M(nn.Module):\n    def f(self): return self._modules",
        "node.meta['tensor_meta']",
        "node.meta.get('stack_trace')",
        "known = 'original_aten' in node.meta",
        "KEY = 'nn_module_stack'",
        "output.meta['desc'] = []",
    ],
)
def test_a_planted_private_name_is_found(planted: str) -> None:
    """The search is not blind to any way of naming them."""
    assert list(private_names(planted))


@pytest.mark.parametrize(
    "allowed",
    [
        "from __future__ import annotations",
        "from .. import _compat",
        "from .._compat.module_state import CALL_HOOKS",
        "node.meta['val'].shape",
        "node.meta[READ], node.meta.get(RUN), SAVED in node.meta",
        "measured._replace(workspace_bytes=0)._asdict()",
        "self._plans[kind], self.__dict__['_plans'], type(x).__name__",
        "_compat.version_counter(tensor)",
        "_ = torch.empty(0)",
    ],
)
def test_what_is_ours_or_documented_is_allowed(allowed: str) -> None:
    """The search raises no false alarm."""
    assert not list(private_names(allowed))


@pytest.mark.thorough
def test_inductor_is_for_plans_under_inductor() -> None:
    """Every module of the client but those that plan under Inductor is imported without it."""
    names = [".".join(p.relative_to(CLIENT).with_suffix("").parts).removesuffix(".__init__") for p in SOURCES]
    names = [n for n in names if not n.startswith("remat.compile.inductor") and n != "remat.__main__"]
    optional = {"remat.trainers.lightning", "remat.trainers.transformers"}
    code = (
        f"import importlib, sys; [importlib.import_module(n) for n in {sorted(set(names) - optional)!r}];"
        "heavy = {'remat._compat.inductor', 'torch._inductor.compile_fx', 'torch._inductor.lowering'};"
        "heavy &= set(sys.modules);"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
