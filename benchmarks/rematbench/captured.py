"""Training steps of models, captured without weights and priced for a device that need not be there.

A model is traced with fake tensors of the device (`remat.target`). Its kernels cost whole nanoseconds by the roofline
of `remat.target.price`: the longer of arithmetic and traffic by the data sheet, times the share that its class of
kernels achieves, and a launch. Fixed bytes are parameters, buffers and inputs.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rematbench.models import MODELS
from remat.device import NAMED
from remat.target.build import build, tracing_for
from remat.target.devices import target_of
from remat.target.price import price
from remat.training.step import training_step
from remat_ir import Graph


def captured(name: str, grouped: bool) -> Graph:
    """A model's training step as a graph: of whole kernels, or of cheap ones merged into their neighbours.

    Raises:
        CaptureError: it cannot be captured as one graph.
        InvalidData: the model cannot be built without values.
    """
    model = MODELS[name]
    target = target_of(model.device)
    with tracing_for(NAMED, target.capability):
        built = build(model.make, NAMED)
        step = training_step(
            built.model,
            built.args,
            built.kwargs,
            grouped=grouped,
            price=lambda kernels: price(kernels, target, None).profiled,
        )
    return replace(step.graph, op_names=None, value_names=None)
