"""The way in to numba, which marks up no message in colour and can read a cache that was filled elsewhere.

Where colorama is installed, numba lets it take the place of `sys.stdout` and `sys.stderr` and give them back for each
error message: thousands of times in one compilation, for errors that are caught again. From a thread that undoes
whoever redirects these streams meanwhile, and a compilation fails where one of them has been closed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_PLAIN = "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"
_set_here = "numba" not in sys.modules and _PLAIN not in os.environ
if _set_here:  # numba reads it once, while it is imported
    os.environ[_PLAIN] = "1"
try:
    from numba import int32, njit
    from numba.core import caching, errors
finally:
    if _set_here:
        del os.environ[_PLAIN]

_scheme: Any = errors.termcolor()
if hasattr(_scheme, "_markup"):  # numba had been imported before
    _scheme._markup = lambda message, *_: message


class FilledCacheLocator(caching.UserProvidedCacheLocator):
    """Finds what was compiled while an image was built, in a folder that cannot be written to.

    Named in NUMBA_CACHE_LOCATOR_CLASSES, with the folder in NUMBA_CACHE_DIR. numba's own locators take no folder that
    is read-only.
    """

    def ensure_cache_path(self) -> None:
        """The folder is there, and nothing will be written: every function has been compiled, for any CPU.

        Raises:
            OSError: it is not there.
        """
        folder: str = self.get_cache_path()  # type: ignore[no-untyped-call]
        os.stat(folder)


__all__ = ["FilledCacheLocator", "int32", "njit"]
