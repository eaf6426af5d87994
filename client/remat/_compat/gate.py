"""Imports every part that all plans need, and refuses by a sentence a torch that lacks what one of them imports."""

from .versions import required

with required():
    from . import (  # noqa: F401
        autograd,
        copying,
        fake_cuda,
        memory,
        module_state,
        operators,
        optimizers,
        tracing,
    )
