"""Puts the stand-in into each process that runs the lane, xdist's workers too, before anything imports torch."""

from __future__ import annotations

import atexit
import os

from . import device

device.install()
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # before torch's own clean-up, which looks for a CUDA runtime
