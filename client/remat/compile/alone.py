"""The graph of one call of a module, captured to be planned alone: nothing of the model runs, and it stays as it is."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _compat
from ..capture.call import CacheSwitch, install_recorders
from ..capture.dataflow import tensors
from ..capture.refused import advice, first_line, layout, logging_functions, place, refuse_sharded
from ..errors import CaptureError
from ..planning.budget import Fraction
from ..planning.options import SolveOptions
from ..planning.planner import planner_for
from .carrier import MOST_GRAPHS, NOTHING_CAPTURED, Carrier, compiled, undisturbed
from .plans import PlannedSizes, Traced
from .sized import Backend, PlannedAhead, SizedGraph, planned_ahead


class _Recorder(Backend):
    """Keeps what is traced of the call that is made, which ends there."""

    def __init__(self) -> None:
        super().__init__(Fraction(1.0), planner_for("greedy"), SolveOptions(on_failure="raise"))
        self.traced: Traced | None = None

    def solve(self, graph: SizedGraph, traced: Traced) -> PlannedSizes:
        """Keep it.

        Raises:
            PlannedAhead: always.
        """
        self.traced = traced
        raise PlannedAhead(None, graph.draws)


def capture(module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Traced:
    """Both passes of `module(*args, **kwargs)` as one graph, as `torch.compile` gives it to a backend.

    The tensors may be fake ones. Python state that the code reads is baked in, and what it changes stays as it is.

    Raises:
        CaptureError: it is no single graph, which a plan of a whole step needs, or has no backward pass; the message
            says why and what to do. In training `remat.enable` plans the parts of a broken forward one by one.

    Example:
        >>> traced = capture(nn.Linear(8, 4), (torch.ones(2, 8),))
        >>> [tuple(tensor.shape) for tensor in traced.inputs]
        [(4, 8), (4,), (2, 8)]
    """
    if not torch.is_grad_enabled():
        raise CaptureError("gradients are disabled: capture a training step outside of torch.no_grad()")
    if _compat.inside_transform():
        raise CaptureError(
            "the call is inside a transform of torch.func (grad, vmap, …), and a plan has a backward pass of its own: "
            "plan the module outside of the transform"
        )
    refuse_sharded(module)
    kwargs = CacheSwitch(module).planned(args, kwargs or {})
    _refuse_not_strided(module, args, kwargs)
    install_recorders(module, kwargs)
    recorder = _Recorder()
    run = compiled(_call_of(module), recorder, fullgraph=True, dynamic=False)
    try:
        with _no_collections(), _compat.dynamo_settings(logging_functions(module), MOST_GRAPHS):
            undisturbed(lambda: planned_ahead(lambda: run(*args, **kwargs)))
    except Exception as error:
        found = _compat.raised_by_backend(error)
        if isinstance(found, CaptureError):
            raise found from None
        raise CaptureError(
            f"{type(module).__name__} cannot be captured as one graph: {advice(module, found)}{first_line(found)}"
            f"{place(str(found))}"
        ) from error
    traced, recorder.traced = recorder.traced, None  # Dynamo keeps each backend until it is reset
    if traced is None:
        why = "it gives no gradients" if recorder.graphs else NOTHING_CAPTURED
        raise CaptureError(f"there is no training step in the call of this {type(module).__name__}: {why}")
    return traced


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Python's collector of cycles rests: what a capture makes stays alive, and walking it again took time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """The call with the module's own hooks around it; of an enabled one, the forward that it has without plans."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, Carrier):
        return forward.own()
    return lambda *args, **kwargs: module(*args, **kwargs)


def _refuse_not_strided(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse sparse and jagged inputs, parameters and buffers by name.

    Raises:
        CaptureError: there is one.
    """
    given = [(f"argument {i}", value) for i, value in enumerate(args)] + list(kwargs.items())
    for name, value in (*given, *module.named_parameters(), *module.named_buffers()):
        for tensor in tensors(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{name} of this {type(module).__name__} is a {layout(tensor)} tensor, whose memory cannot be "
                    "planned: pass dense (padded) tensors, or plan the part of the model that takes them"
                )
