"""A model whose graph of Dynamo's is run by what a caller has made for it, such as a plan's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from remat import _compat
from remat.capture.refused import logging_functions
from remat.compile.carrier import MOST_GRAPHS, with_own_code


def behind(module: nn.Module, run: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    """The module's calls; `run` is given the inputs of the one graph that Dynamo makes of them."""
    call = with_own_code(lambda *args, **kwargs: module(*args, **kwargs))  # of one code Dynamo compiles few
    compiled = torch.compile(call, backend=lambda graph, _: lambda *inputs: run(inputs), fullgraph=True, dynamic=False)

    def called(*args: Any, **kwargs: Any) -> Any:
        with _compat.dynamo_settings(logging_functions(module), MOST_GRAPHS):
            return compiled(*args, **kwargs)

    return called
