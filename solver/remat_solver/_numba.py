"""The way in to numba: kernels whose compiled code is read wherever it is and written where that is possible.

Where colorama is installed, numba lets it take the place of `sys.stdout` and `sys.stderr` and give them back for each
error message: thousands of times in one compilation, for errors that are caught again. From a thread that undoes
whoever redirects these streams meanwhile, and a compilation fails where one of them has been closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_PLAIN = "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"
_set_here = "numba" not in sys.modules and _PLAIN not in os.environ
if _set_here:  # numba reads it once, while it is imported
    os.environ[_PLAIN] = "1"
try:
    from numba import int32, njit
    from numba.core import caching as _caching
    from numba.core import errors
    from numba.core.registry import cpu_target
finally:
    if _set_here:
        del os.environ[_PLAIN]

caching: Any = _caching  # it has no types
_scheme: Any = errors.termcolor()
if hasattr(_scheme, "_markup"):  # numba had been imported before
    _scheme._markup = lambda message, *_: message

KERNELS: list[Any] = []
"""Every kernel of the modules that have been imported."""
_writes = True
_log = logging.getLogger("remat.solver")


def inner(function: Any = None, **options: Any) -> Callable[..., Any]:
    """A decorator for what kernels alone call: neither wrapped for Python nor cached by itself, to compile less."""
    bare: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # numba's types do not know them
    made: Callable[..., Any] = njit(function, **bare, **options)
    return made


def kernel(**options: Any) -> Callable[[Any], Any]:
    """A decorator for a function that Python calls and numba compiles, once for each cache that can be written."""

    def decorate(function: Any) -> Any:
        made = njit(**options)(function)
        if made is function:  # by NUMBA_DISABLE_JIT
            return made
        with contextlib.suppress(RuntimeError):  # no folder can be read or written: each process compiles for itself
            made._cache = _Cache(function)
        KERNELS.append(made)
        return made

    return decorate


def cached(made: Any) -> bool:
    """Whether the compiled code of a kernel, as its source is now, is in the cache."""
    return isinstance(made._cache, _Cache) and made._cache.filled()


def writable(made: Any) -> bool:
    """Whether the compiled code of a kernel can be kept."""
    return _writes and isinstance(made._cache, _Cache) and os.access(made._cache.cache_path, os.W_OK)


def write_no_cache() -> None:
    """From now on this process and its forks only read: a cache file is a pickle, which runs where it is read."""
    global _writes
    _writes = False


def _processor() -> Any:
    """What numba compiles for: system, processor and its features."""
    return cpu_target.target_context.codegen().magic_tuple()


@cache
def _stamp(folder: str) -> bytes:
    """A digest of a package's source: a kernel is compiled together with what it calls in other modules there."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """A folder that can be written, or that holds the compiled code of this source: made with an image, for one."""

    def get_source_stamp(self) -> bytes:
        return _stamp(os.path.dirname(self._py_file))

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError:
            processor = str(_processor()[1]).encode()
            for file in Path(self.get_cache_path()).glob("*.nbi"):
                index = file.read_bytes()
                if self.get_source_stamp() in index and processor in index:
                    return
            raise


class _Given(_Locator, caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """The folder of NUMBA_CACHE_DIR."""


class _InPackage(_Locator, caching.InTreeCacheLocator):  # type: ignore[misc]
    """Next to the source."""


class _OfUser(_Locator, caching.UserWideCacheLocator):  # type: ignore[misc]
    """In the user's cache folder."""


class _Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Given, _InPackage, _OfUser)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Files

    def filled(self) -> bool:
        with contextlib.suppress(Exception):
            return any(key[1] == _processor() for key in self._cache_file._load_index())
        return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        with contextlib.suppress(Exception):  # a damaged file: compiled again
            found = super().load_overload(sig, target_context)
        if found is None and not _writes:
            _log.warning("compiling kernel %s for %s, which was not done ahead", self._name, sig)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        if not _writes:
            return
        with contextlib.suppress(OSError):  # a full disk, or a folder that is only read
            try:
                super().save_overload(sig, data)
            except OSError:
                raise
            except Exception:  # noqa: BLE001 – a damaged index may fail in any way: begun anew
                self.flush()
                super().save_overload(sig, data)


__all__ = ["KERNELS", "cached", "inner", "int32", "kernel", "writable", "write_no_cache"]
