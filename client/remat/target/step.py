"""The training step of a model on a device that is named, on one rank of many: captured from fake tensors, priced.

Ranks are replicas, share states, or have a part of a model split by tensors. Nothing is sent, and messages take no time
here. Sharding is that of `fully_shard` around each block of a model, and around the model with what is outside of them.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx, nn

from remat_ir import Graph, InvalidData, Plan, RematError, plain_plan, readable, recomputed

from ..capture.operations import Kind, Op, Operations, to_graph
from ..device import NAMED, here
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from ..planning.profiles import ProfileTable
from ..profiling.fixed import all_gradients
from ..profiling.optimizers import UpdateMemory
from ..profiling.profile import Profiled, device_kind
from ..training.job import Job
from ..training.memory import fresh, reserved
from ..training.step import TrainingStep, name_of, running_peak, training_step
from .build import Built, build, tracing_for
from .devices import Target, target_of
from .price import Priced, price, spread

T = TypeVar("T")
U = TypeVar("U")

FORM = "write dp=8, fsdp=8, tp=4, cp=2, ep=8 or pp=4, or several of them with commas"

AT_WORK = 2
"""Blocks whose parameters are gathered at a time: the one that runs, and the next one, which is fetched meanwhile."""


class Parallel(NamedTuple):
    """So many ranks for each way to spread a job.

    Attributes:
        dp: replicas by DistributedDataParallel, whose buckets hold all gradients.
        fsdp: ranks that share parameters, gradients and optimizer state by `fully_shard`.
        tp: ranks that share each layer; the function that makes the model is given it, and makes one rank's part.
        cp: ranks that share each sequence; the function is given it, and makes a call of one rank's tokens. Keys and
            values of the others come by in turn, a share at a time (ring attention).
        ep: ranks that share the experts of each layer; the function is given it, and makes one rank's part. A rank
            computes as many tokens as it sends away, which is so where the router is balanced.
        pp: ranks of a pipeline; the function is given `stage` and `stages`, and makes that stage's part.
        micros: micro-batches of a pipeline's step; left out, two a rank.
        schedule: of the pipeline, by torch's name: 1F1B, GPipe, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    micros: int = 0
    schedule: str = ""

    @classmethod
    def of(cls, text: str | None) -> Parallel:
        """Read "fsdp=8,tp=2".

        Raises:
            InvalidData: it is something else, or a combination that is not known.
        """
        found: dict[str, Any] = {}
        for part in (text or "").split(",") if text else ():
            name, _, degree = part.strip().partition("=")
            number = name == "schedule" or (degree.isdecimal() and int(degree) >= 1)
            if name not in cls._fields or name in found or not degree or not number:
                raise InvalidData(f"parallel: {part.strip()!r} is not a way to spread a job: {FORM}")
            found[name] = degree if name == "schedule" else int(degree)
        made = cls(**found)
        if made.dp > 1 and made.fsdp > 1:
            raise InvalidData("parallel: dp replicates the gradients that fsdp shards: write one of them")
        if made.pp == 1 and (made.micros or made.schedule):
            raise InvalidData("parallel: micros and schedule are those of a pipeline: write pp=4 too")
        if made.pp > 1 and made.dp * made.fsdp > 1:
            raise InvalidData(
                "parallel: a stage of a pipeline inside DDP or fully_shard is not planned: no pp with dp, fsdp"
            )
        if made.pp == 1:
            return made
        return made._replace(micros=made.micros or 2 * made.pp, schedule=made.schedule or "1F1B")

    @property
    def ranks(self) -> int:
        """In all."""
        return self.dp * self.fsdp * self.tp * self.cp * self.ep * self.pp

    @property
    def shared(self) -> dict[str, int]:
        """What the function that makes the model is given: how many ranks share a layer, a sequence, the experts."""
        return {name: degree for name, degree in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)) if degree > 1}

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._asdict().items() if value not in (0, 1, ""))

    def check_released(self) -> None:
        """Refuse gradients that are released inside the backward pass where ranks or micro-batches add them up.

        Raises:
            InvalidData: they are.
        """
        if self.pp > 1:
            raise InvalidData("release_gradients does not go with pp: gradients add up over the micro-batches")
        if self.dp * self.fsdp * self.cp * self.ep > 1:
            raise InvalidData(
                "release_gradients does not go with dp, fsdp, cp or ep: ranks reduce gradients before updates"
            )

    def fixed(self, model: nn.Module) -> dict[str, int]:
        """Bytes that are there throughout on one rank besides those of a job on one, by what they are."""
        if self.dp > 1:
            return {"DDP's buckets": all_gradients(model)}
        if self.fsdp == 1:
            return {}
        blocks = blocks_of(model)
        inside = {id(p) for block in blocks for p in block.parameters()}
        outside = nn.ParameterList(p for p in model.parameters() if id(p) not in inside)
        *at_work, root = (sum(p.numel() * p.element_size() for p in part.parameters()) for part in (*blocks, outside))
        gathered = root + sum(sorted(at_work)[-AT_WORK:])  # the model's own unit stays gathered throughout
        gradients = 2 * max(map(all_gradients, (*blocks, outside)))  # of a unit that is reduced, and the copy sent
        return {"parameters that are gathered": gathered, "gradients that are reduced": gradients}

    def of_rank(self, step: TrainingStep) -> TrainingStep:
        """A step with the shards of one rank in the place of whole parameters, states and gradients."""
        if self.fsdp == 1:
            return step
        shares = ("parameters", "optimizer state", "gradients")
        fixed = {name: ceil(size / self.fsdp) if name in shares else size for name, size in step.fixed.items()}
        ops = sharded_gradients(step.operations, self.fsdp, step.parameters)
        graph, values = to_graph(ops, step.profiled.kernels, sum(fixed.values()))
        return replace(step, operations=ops, graph=graph, values=values, fixed=fixed)


ALONE = Parallel()
"""One rank."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules in a model's longest lists of modules, each of which `fully_shard` gathers alone; else the model."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    longest = max(lists, key=len, default=None)
    return list(longest.children()) if longest else [model]


def sharded_gradients(step: Operations, ranks: int, parameters: Collection[int]) -> Operations:
    """The step where each gradient is reduced to a rank's share as soon as it is complete, and freed.

    Args:
        parameters: the positions of the parameters among the tensors that the step is given.
    """
    flow = step.flow
    trained = frozenset(flow.given[n] for n in parameters)
    pairs = zip(flow.primals, flow.backward_results, strict=False)
    results = list(dict.fromkeys(r for p, r in pairs if p in trained and isinstance(r, fx.Node)))
    returned = flow.storages(flow.forward_results)
    sizes, keep = list(step.sizes), set(step.keep)
    copies = {op.nodes[0]: op for op in step.ops if op.kind is Kind.ACCUMULATE and op.nodes[0] in results}
    ops = [op for op in step.ops if op not in copies.values()]
    after: dict[int, list[Op]] = {}
    for result in results:
        own = frozenset(flow.storages_of.get(result, ()))
        makers = [at for at, op in enumerate(ops) if own & set(op.makes)]
        if not makers or not (own & keep or result in copies):
            continue
        keep -= own - returned
        keep -= set(copies[result].makes) if result in copies else set()
        value = result.meta["val"]
        sizes.append(ceil(value.numel() / ranks) * value.element_size())
        keep.add(len(sizes) - 1)
        reduced = Op(Kind.ACCUMULATE, (result,), tuple(sorted(own)), (len(sizes) - 1,))
        after.setdefault(max(makers), []).append(reduced)
    placed = [one for at, op in enumerate(ops) for one in (op, *after.get(at, ()))]
    return replace(step, ops=tuple(placed), sizes=tuple(sizes), keep=frozenset(keep))


@dataclass(frozen=True, eq=False)
class Asked:
    """The arguments of `remat.target.fit.predict`, read: see there."""

    make_model: Callable[..., Any]
    target: Target
    parallel: Parallel
    optimizer: str | None
    batch: int | None
    max_overhead: float
    planner: CoordinatedPlanner
    options: SolveOptions
    phase: Callable[[str], None]

    @property
    def memory_bytes(self) -> int:
        """What a job may fill of the device."""
        return self.target.usable_bytes

    @property
    def batch_is_free(self) -> bool:
        """Whether the function takes a batch, of which the largest can be looked for."""
        return "batch" in inspect.signature(self.make_model).parameters

    @property
    def known_batch(self) -> int | None:
        """The batch of what is made where none other is asked for; None: nobody knows."""
        if self.batch is not None or not self.batch_is_free:
            return self.batch
        default = inspect.signature(self.make_model).parameters["batch"].default
        return default if isinstance(default, int) else None


class Parts:
    """Parts of a prediction, one after the other: what failed is noted, and what is finished stays.

    After an interrupt no further part is begun.
    """

    def __init__(self) -> None:
        self._unknown: dict[str, str] = {}
        self._interrupted = False

    def part(self, name: str, make: Callable[[], T], otherwise: U) -> T | U:
        """What `make` gives, or `otherwise` with a note under this name of why it gave nothing."""
        why = "interrupted"
        if not self._interrupted:
            try:
                return make()
            except KeyboardInterrupt:
                self._interrupted = True
            except RematError as error:
                why = str(error)
        self._unknown[name] = why
        return otherwise

    def unknown(self) -> dict[str, str]:
        """The parts that failed since this was last asked, and why."""
        found, self._unknown = self._unknown, {}
        return found


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
        return self.step.update_peak_bytes(self.update)

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
        parallel: ranks that the job is spread over, of which this is one: see `remat.target.step.Parallel`.
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
    found: list[Priced] = []

    def modelled(kernels: Sequence[fx.Node]) -> Profiled:
        assert target is not None
        found.append(price(kernels, target, table, spread_over.cp))
        return found[0].profiled

    with tracing_for(place) if target is None else tracing_for(place, target.capability):
        phase("building the model")
        start = time.perf_counter()
        built: Built = build(make_model, place, batch, spread_over.shared)
        seconds["build"] = time.perf_counter() - start
        job = Job(optimizer_of(built.model, optimizer), releases=release_gradients)
        weights = sum(p.numel() * p.element_size() for p in built.model.parameters())
        held = {"parameters": weights, **job.fixed(built.model)}
        known = ", ".join(f"{name} {readable(size)}" for name, size in held.items() if size)
        start = time.perf_counter()
        step = spread_over.of_rank(
            training_step(
                built.model,
                built.args,
                built.kwargs,
                table=table,
                extra={**job.fixed(built.model), **spread_over.fixed(built.model)},
                price=modelled if target else None,
                phase=lambda text: phase(f"{text}; {known}"),
                release=job.release,
                like=None if like is None else like.step,
            )
        )
        update = UpdateMemory(*(ceil(size / spread_over.fsdp) for size in job.update()))  # of one rank
        seconds["price"] = step.profiled.seconds
        seconds["capture"] = time.perf_counter() - start - seconds["price"]
        names = built.name, name_of(built.model, built.args, built.kwargs)
        if target is None:
            return TargetStep(*names, step, None, device_kind(step.operations.flow.kernels), {}, seconds, update, job)
        return TargetStep(*names, step, target, found[0].words, found[0].classes, seconds, update, job)


def optimizer_of(model: nn.Module, name: str | None) -> torch.optim.Optimizer | None:
    """One of torch's optimizers for all parameters that are trained, by its class's name, with its usual settings.

    "sgd" is SGD without momentum, "sgd-momentum" with it; None and "none" are none.

    Raises:
        InvalidData: torch has none of that name.
    """
    if name is None or name.lower() == "none":
        return None
    word, _, momentum = name.lower().partition("-")
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
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
        return known[word](trained, **settings)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"the optimizer {name} does not take this model's parameters: {error}") from None
