"""Python in a process of its own, with all that the tests import."""

from __future__ import annotations

import os
import subprocess
import sys


def environment(*folders: object, **variables: str) -> dict[str, str]:
    """That of this process, its path of modules included, after some folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, sys.path)]), **variables}


def printed(script: str) -> str:
    """What a script prints; it has to succeed."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
