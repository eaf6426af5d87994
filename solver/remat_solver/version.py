"""Which solver this is: two of them that may answer differently have different versions."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import remat_ir


@cache
def solver_version() -> str:
    """The package's version, a digest of the source of `remat_solver` and `remat_ir`, and the version of HiGHS.

    The digest is of syntax trees without docstrings: comments and layout do not count. At most 50 characters.

    >>> solver_version().startswith(f"{_version_of('remat')}+")
    True
    """
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(remat_ir.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder.parent).as_posix()
            digest.update(f"{name}\n{_tree_of(path.read_bytes())}\n".encode())
    return f"{_version_of('remat')[:16]}+{digest.hexdigest()[:12]}.highs{_version_of('highspy')[:12]}"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unreleased"


class _NoStrings(ast.NodeTransformer):
    """Leaves out statements that are a string: docstrings, of attributes too."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _tree_of(source: bytes) -> str:
    return ast.dump(_NoStrings().visit(ast.parse(source)))
