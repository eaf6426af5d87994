"""The training step of a model on a device that is named: captured from fake tensors, priced, planned."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from remat_ir import Graph, InvalidData, Plan, plain_plan, recomputed

from ..capture.operations import returned_gradients
from ..device import NAMED, here
from ..planning.profiles import ProfileTable
from ..profiling.optimizers import UpdateMemory
from ..profiling.profile import Profiled, device_kind
from ..training.job import Job
from ..training.memory import fresh, reserved
from ..training.step import TrainingStep, name_of, running_peak, training_step
from .build import Built, build, tracing_for
from .devices import Target, target_of
from .parallel import Parallel
from .price import Priced, price, spread


@dataclass(frozen=True, eq=False)
class TargetStep:
    """A training step as it would be on a device.

    Attributes:
        name: of the model's class.
        call_name: the same, with the shape of the first input.
        step: what was captured.
        target: the named device; None: kernels were measured on this machine.
        priced: in words, where the costs are from.
        classes: the class of each kernel; empty where kernels were measured.
        seconds: of each phase.
        update: what the optimizer's step takes, by a dry run of it.
        job: the optimizer, and what else is there next to the step.
    """

    name: str
    call_name: str
    step: TrainingStep
    target: Target | None
    priced: str
    classes: Mapping[fx.Node, str]
    seconds: Mapping[str, float]
    update: UpdateMemory
    job: Job

    @property
    def graph(self) -> Graph:
        """What is planned."""
        return self.step.graph

    def peak_bytes(self, plan: Plan | None = None) -> int:
        """The most that the step holds as it runs by a plan, kernel by kernel; None: without one."""
        return running_peak(self.step, plan or plain_plan(self.graph))

    def reserved_bytes(self, plan: Plan | None = None) -> int | None:
        """The most that torch's caching allocator reserves on the device for steps by a plan, each with its update.

        None where no device is named: this machine's own is counted when the step is planned there.
        """
        if self.target is None:
            return None
        return reserved(self.step, plan or plain_plan(self.graph), fresh(self.step), self.job).reserved

    @property
    def update_peak_bytes(self) -> int:
        """The peak of the optimizer's step: fixed bytes, gradients, what the model returned, and its temporaries."""
        kept = sum(self.step.operations.sizes[s] for s in self.step.operations.keep)
        return self.graph.fixed_bytes + kept + self.update.temporaries_bytes - self.update.beside_passes_bytes

    def overhead_range(self, plan: Plan) -> tuple[float, float] | None:
        """What the plan costs more, at least and at most, if each class of kernels is off by up to 20 %.

        None where the kernels were measured.
        """
        if not self.classes:
            return None
        whole: Counter[str] = Counter()
        again: Counter[str] = Counter()
        costs = self.step.profiled.kernels
        for op, times in zip(self.step.operations.ops, recomputed(plan, self.graph.ops), strict=True):
            for node in op.nodes:
                if node in self.classes:
                    whole[self.classes[node]] += costs[node].cost_ns
                    again[self.classes[node]] += times * costs[node].cost_ns
        return spread(again, whole)


def target_step(
    make_model: Callable[..., Any],
    device: str | Target | None = None,
    *,
    batch: int | None = None,
    optimizer: str | None = None,
    release_gradients: bool = False,
    parallel: str | None = None,
    table: ProfileTable | None = None,
    like: TargetStep | None = None,
    phase: Callable[[str], None] = lambda _: None,
) -> TargetStep:
    """Capture and price the training step of what a function makes, without allocating the model.

    Args:
        make_model, batch: as for `remat.target.build.build`.
        device: the device that the step is for; None: this machine's accelerator if there is one, else its CPU, and
            kernels are measured there, one by one.
        optimizer: the name of a class of `torch.optim`, in any case; its state counts as fixed bytes.
        release_gradients: each parameter is updated inside the backward pass, and its gradient freed.
        parallel: ranks that the job is spread over, of which this is one: see `remat.target.parallel.Parallel`.
        table: of measured costs.
        like: the step at another batch: where the kernels are the same ones, they form the same ops.
        phase: called with what is done from now on.

    Raises:
        InvalidData: the device is not known, or the function does not give a model and a call of it, or its gradients
            cannot be released.
        CaptureError: the step cannot be captured as one graph.
    """
    target, spread_over = None if device is None else target_of(device), Parallel.of(parallel)
    if spread_over.pp > 1:
        raise InvalidData("a pipeline has a step for each stage: ask remat.target.fit.predict")
    if release_gradients:
        spread_over.check_released()
    place = here() if target is None else NAMED
    seconds: dict[str, float] = {}
    with tracing_for(place) if target is None else tracing_for(place, target.capability):
        phase("building the model")
        start = time.perf_counter()
        built: Built = build(make_model, place, batch, spread_over.shared)
        seconds["build"] = time.perf_counter() - start
        job = Job(optimizer_of(built.model, optimizer), releases=release_gradients)
        return _captured(built, target, job, spread_over, table, None if like is None else like.step, phase, seconds)


def optimizer_of(model: nn.Module, name: str | None) -> torch.optim.Optimizer | None:
    """One of torch's optimizers for all parameters that are trained, by its class's name, with its usual settings.

    "sgd" is SGD without momentum, "sgd-momentum" with it; None and "none" are none.

    Raises:
        InvalidData: torch has none of that name.
    """
    if name is None or name.lower() == "none":
        return None
    word, _, momentum = name.lower().partition("-")
    known = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if word not in known or (momentum and (word, momentum) != ("sgd", "momentum")):
        raise InvalidData(
            f"there is no optimizer {name!r}: write one of {', '.join(sorted(known))}, sgd-momentum or none"
        )
    settings = {"lr": 1e-3, "momentum": 0.9} if momentum else {"lr": 1e-3}
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        return known[word](trained, **settings)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidData(f"the optimizer {name} does not take this model's parameters: {error}") from None


def _captured(
    built: Built,
    target: Target | None,
    job: Job,
    parallel: Parallel,
    table: ProfileTable | None,
    like: TrainingStep | None,
    phase: Callable[[str], None],
    seconds: dict[str, float],
) -> TargetStep:
    found: list[Priced] = []
    start = time.perf_counter()

    def modelled(kernels: Sequence[fx.Node]) -> Profiled:
        assert target is not None
        found.append(price(kernels, target, table, parallel.cp))
        return found[0].profiled

    pricing = modelled if target else None
    extra = {**job.fixed(built.model), **parallel.fixed(built.model)}
    how: dict[str, Any] = {"table": table, "extra": extra, "price": pricing, "phase": phase, "release": job.release}
    how["like"] = like
    step = parallel.of_rank(training_step(built.model, built.args, built.kwargs, **how))
    update = parallel.of_update(job.update())
    if job.releases and not returned_gradients(step.operations):
        update = update._replace(temporaries_bytes=update.beside_passes_bytes)  # every parameter is updated by then
    seconds["price"] = step.profiled.seconds
    seconds["capture"] = time.perf_counter() - start - seconds["price"]
    names = built.name, name_of(built.model, built.args, built.kwargs)
    if target is None:
        return TargetStep(*names, step, None, device_kind(step.operations.flow.kernels), {}, seconds, update, job)
    words = f"a roofline of {target.name}"
    if found[0].recorded:
        kinds = f"{found[0].recorded} of {step.profiled.signatures} kinds of kernels"
        words = f"{kinds} recorded on {target.name}, the others from {words}"
    return TargetStep(*names, step, target, words, found[0].classes, seconds, update, job)
