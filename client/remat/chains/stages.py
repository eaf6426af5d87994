"""Stages that read and make what is stored at cuts, run step by step by a plan: one pass forward and one back.

A chain is the case where stage l reads cut l − 1 and makes cut l; in a join several branches meet in a stage that reads
the last cut of each. Every cut is read by at most one stage. Gradients of parameters that several stages use meet as in
plain training, before hooks see them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from remat_ir import Verb

from .._compat import boxed_gradients, parameters_of, version_counter
from .._compat.gradients import gives_all_gradients
from ..capture.refused import refuse_searching_ddp
from ..errors import CaptureError
from ..lowering.link import Copies, Link, link_of
from ..switch import note_planned_call
from .saved_state import SavedState
from .tape import Held, Packing, Tape, record


class SharedParameters:
    """The parameters with a gradient that more than one of some modules uses, in the order of a plain forward pass.

    Attributes:
        users: for each such parameter, the stages that use it, in the order in which autograd adds up their parts.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        found = [{name: p for name, p in module.named_parameters() if p.requires_grad} for module in modules]
        times = Counter(id(p) for named in found for p in named.values())
        self._names = [{name: p for name, p in named.items() if times[id(p)] > 1} for named in found]
        self.users: dict[nn.Parameter, tuple[int, ...]] = {}
        for n, named in reversed(list(enumerate(self._names))):
            for parameter in named.values():
                self.users[parameter] = (*self.users.get(parameter, ()), n)

    def of(self, n: int) -> Mapping[str, nn.Parameter]:
        """The shared parameters of stage n, by their names in its module."""
        return self._names[n]


class SharedGradients(SharedParameters):
    """Adds up the parts of shared parameters' gradients in plain training's order, and accumulates each sum once.

    Floating-point addition does not associate: a part that comes before its turn waits.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self._waiting: dict[nn.Parameter, dict[int, torch.Tensor | None]] = {p: {} for p in self.users}
        self._sums: dict[nn.Parameter, tuple[torch.Tensor | None, bool]] = {}
        self._next = dict.fromkeys(self.users, 0)

    def add(self, n: int, parts: Mapping[str, list[torch.Tensor]]) -> None:
        """Take the parts that the backward step of stage n made, by name; none is a part, too."""
        for name, parameter in self.of(n).items():
            found = parts.get(name)
            self._waiting[parameter][n] = found.pop() if found else None
            self._meet(parameter)

    def _meet(self, parameter: nn.Parameter) -> None:
        users, waiting = self.users[parameter], self._waiting[parameter]
        total, own = self._sums.pop(parameter, (None, False))
        at = self._next[parameter]
        while at < len(users) and users[at] in waiting:
            part = waiting.pop(users[at])
            at += 1
            if part is None:
                continue
            if total is None:
                total = part
            elif own:
                total.add_(part)
            else:
                total, own = total + part, True
        self._next[parameter] = at
        if at < len(users):
            self._sums[parameter] = (total, own)
        elif total is not None:
            torch.autograd.backward((parameter,), (total,))


FORWARD = (Verb.F_CK, Verb.F_ALL)
"""Run a stage forward: without a tape, and with one."""


class StageStep(NamedTuple):
    """One step of a pass: with a stage (`FORWARD`, B), or with what is stored at a cut (FREE, transfers), both from 0.

    A forward step frees nothing, and B its own stage's tape alone: all else that goes has a step FREE.
    """

    verb: Verb
    at: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A module between cuts.

    Attributes:
        reads, makes: cuts, by number.
        needs_grad: whether it must run with grad even where no tape is kept, to compute the same bits.
    """

    module: nn.Module
    reads: tuple[int, ...]
    makes: int
    needs_grad: bool = False


class Schedule:
    """Stages and the steps of a plan, with what each run has to know beforehand.

    Attributes:
        forward, backward: the steps before and from the first backward step on.
        again: the stages of which these run some forward.
        modes: whether each module was in train mode when the stages were measured.
    """

    def __init__(
        self, stages: Sequence[Stage], steps: Sequence[StageStep], modes: tuple[bool, ...] | None = None
    ) -> None:
        self.stages = tuple(stages)
        turn = next(i for i, step in enumerate(steps) if step.verb is Verb.B)
        self.forward, self.backward = tuple(steps[:turn]), tuple(steps[turn:])
        self.times = Counter(step.at for step in steps if step.verb in FORWARD)
        self.again = frozenset(step.at for step in self.backward if step.verb in FORWARD)
        self.modes = self.modes_now() if modes is None else modes
        self.lets_go, self.moves = _hooked(self.stages, steps)
        self.transfers = any(step.verb is Verb.OFFLOAD for step in steps)

    def modes_now(self) -> tuple[bool, ...]:
        """Whether each module is in train mode."""
        return tuple(module.training for stage in self.stages for module in stage.module.modules())

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Look whether the stages are still those that were planned.

        Raises:
            CaptureError: one of them is not.
        """
        for n, (stage, module) in enumerate(zip(self.stages, modules, strict=False), 1):
            if stage.module is not module:
                planned, now = type(stage.module).__name__, type(module).__name__
                raise CaptureError(
                    f"stage {n} is not the {planned} that was planned, but a {now} in its place, such as a replica of "
                    "DataParallel: plan the stages again"
                )

    def trains(self, xs: Sequence[torch.Tensor]) -> bool:
        """Whether anything that is known of requires gradients."""
        modules = (stage.module for stage in self.stages)
        return any(x.requires_grad for x in xs) or any(p.requires_grad for m in modules for p in m.parameters())


def _hooked(stages: Sequence[Stage], steps: Sequence[StageStep]) -> tuple[frozenset[int], frozenset[int]]:
    """Stages of which an input leaves the device while their tape lives, and stages whose tape itself leaves it."""
    reader = {cut: n for n, stage in enumerate(stages) for cut in stage.reads}
    maker = {stage.makes: n for n, stage in enumerate(stages)}
    taped: set[int] = set()
    inputs: set[int] = set()
    tapes: set[int] = set()
    for verb, at in steps:
        if verb is Verb.F_ALL:
            taped.add(at)
        elif verb is Verb.B:
            taped.discard(at)
        elif verb in (Verb.FREE, Verb.DROP) and reader.get(at) in taped:
            inputs.add(reader[at])
        if verb is Verb.OFFLOAD and maker.get(at) in taped:
            tapes.add(maker[at])
    return frozenset(inputs), frozenset(tapes)


class Pass:
    """What one forward and backward pass holds, and how each step changes it.

    Attributes:
        held: what is stored, by cut.
        gradients: gradients of what is or was stored, by cut, until a backward step has used them.
    """

    def __init__(self, schedule: Schedule, inputs: Mapping[int, torch.Tensor]) -> None:
        self.schedule = schedule
        device = next(iter(inputs.values())).device
        self.device = device
        self.held = {cut: Held(x.detach()) for cut, x in inputs.items()}
        self.needs = {cut: x.requires_grad for cut, x in inputs.items()}
        self.gradients: dict[int, torch.Tensor | None] = {}
        self._autocast = _autocast(device)
        # in another mode than was measured a stage may have other kernels without grad
        self._with_grad = schedule.modes_now() != schedule.modes
        self._read: list[tuple[str, Mapping[Any, Any], Any, torch.Tensor, int, torch.UntypedStorage]] = []
        self._left = schedule.times.copy()
        self._saved: dict[int, SavedState] = {}
        # now, not once and for all: a wrapper such as FSDP puts other parameters in their places
        self._shared = SharedGradients([stage.module for stage in schedule.stages])
        self._link: Link | None = link_of(device) if schedule.transfers else None
        self._copies: dict[int, Copies] = {}
        self._moving: dict[int, tuple[Verb, Any, list[torch.UntypedStorage]]] = {}

    def run(self, steps: Sequence[StageStep]) -> None:
        """Run steps in order."""
        for verb, at in steps:
            if verb is Verb.B:
                self.backward(at)
            elif verb in FORWARD:
                self.forward(at, tape=verb is Verb.F_ALL)
            elif verb is Verb.FREE:
                self._forget(at)
            else:
                self._transfer(verb, at)

    def at(self, cut: int) -> torch.Tensor:
        """The activation that is stored at a cut, on the device."""
        found = self.held[cut].activation
        assert found is not None
        return found

    def forward(self, n: int, *, tape: bool) -> None:
        """A forward step of stage n, with or without a tape."""
        stage = self.schedule.stages[n]
        inputs = [self.at(cut) for cut in stage.reads]
        versions = [version_counter(x) for x in inputs]
        self._left[n] -= 1
        last, saved = not self._left[n], self._saved.get(n)
        around = contextlib.nullcontext() if saved is None else saved.restored(last=last)
        if saved is None and not last:
            self._saved[n] = SavedState(stage.module, self.device)
        with around, self._autocast():
            if tape:
                self.held[stage.makes] = Held(*self._record(n, inputs))
            elif stage.needs_grad or self._with_grad:
                self.held[stage.makes] = Held(self._record(n, inputs)[0])
            else:
                with torch.no_grad():
                    self.held[stage.makes] = Held(stage.module(*inputs).detach())
        name = f"stage {n + 1} ({type(stage.module).__name__})"
        if [version_counter(x) for x in inputs] != versions:
            raise CaptureError(f"{name} overwrites its input: use inplace=False")
        if saved is None and not last:
            self._saved[n].check(name)

    def note(self) -> None:
        """The forward steps have run: what the backward ones compute from again must stay as it is."""
        for n in sorted(self.schedule.again):
            stage = self.schedule.stages[n]
            found: list[tuple[str, Mapping[Any, Any], Any]] = [
                (f"{path}.{name}".lstrip("."), parameters_of(part), name)
                for path, part in stage.module.named_modules()
                for name in parameters_of(part)
            ]
            found += [(f"input {cut + 1}", self.held, cut) for cut in stage.reads if cut in self.needs]
            for name, holder, key in found:
                tensor = _tensor(holder.get(key))
                if tensor is not None:
                    # the storage itself: once it is gone another one may have its number
                    seen = version_counter(tensor), tensor.untyped_storage()
                    self._read.append((f"{name} of stage {n + 1}", holder, key, tensor, *seen))

    def compare(self) -> None:
        """The backward steps begin.

        Raises:
            RuntimeError: what they compute from again has been written to.
            CaptureError: it is another tensor, or in another storage.
        """
        for name, holder, key, tensor, version, storage in self._read:
            now = _tensor(holder.get(key))
            if now is not tensor or now.untyped_storage() is not storage:
                raise CaptureError(
                    f"{name} was replaced between the forward and the backward pass, which computes from it again: "
                    "replace it after backward()"
                )
            if version_counter(now) != version:
                raise RuntimeError(
                    f"{name}, from which the backward pass computes again, has been modified by an inplace operation "
                    "since the forward pass: step the optimizer, and fill inputs anew, after backward()"
                )
        self._read.clear()

    def _record(self, n: int, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Tape]:
        schedule = self.schedule
        stage = schedule.stages[n]
        needs = [self.needs.get(cut, True) and differentiable(self.at(cut)) for cut in stage.reads]
        packing = None
        if n in schedule.lets_go or n in schedule.moves:
            # the graph must not hold the pass, which holds the graph
            this = weakref.ref(self)
            named = dict(zip(stage.reads, inputs, strict=True))
            packing = Packing(named, stage.module, n in schedule.moves, lambda cut: this().at(cut))  # type: ignore[union-attr]
        return record(stage.module, inputs, needs, self._shared.of(n), packing)

    def backward(self, n: int) -> None:
        """The backward step of stage n: its inputs' gradients from its output's, its parameters' on the way."""
        stage = self.schedule.stages[n]
        tape = self.held[stage.makes].tape
        assert tape is not None
        self._forget(stage.makes)
        tape.backward(self.gradients.pop(stage.makes, None))
        for cut, found in zip(stage.reads, tape.inputs, strict=True):
            self.gradients[cut] = found.pop() if found else None
        self._shared.add(n, tape.parameters)

    def _forget(self, cut: int) -> None:
        del self.held[cut]
        self._copies.pop(cut, None)

    def _transfer(self, verb: Verb, cut: int) -> None:
        assert self._link is not None
        held = self.held[cut]
        if verb is Verb.OFFLOAD:
            storages = held.settle()
            self._copies[cut], token = self._link.out(storages)
            self._moving[cut] = (verb, token, [])
        elif verb is Verb.PREFETCH:
            storages, token = self._link.back(self._copies[cut])
            self._moving[cut] = (verb, token, storages)
        elif verb is Verb.DROP:
            held.leave()
        else:
            direction, token, storages = self._moving.pop(cut)
            self._link.wait(token)
            if direction is Verb.PREFETCH:
                held.arrive(storages)
                del self._copies[cut]


def _tensor(held: Any) -> torch.Tensor | None:
    return held.activation if isinstance(held, Held) else held


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _autocast(device: torch.device) -> Any:
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cached)


@boxed_gradients  # so that the incoming gradient can be freed on the way
class _Staged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, schedule: Schedule, cuts: Sequence[int], anchor: torch.Tensor, *xs: torch.Tensor) -> Any:
        state = Pass(
            schedule, {cut: x.detach().requires_grad_(x.requires_grad) for cut, x in zip(cuts, xs, strict=True)}
        )
        state.run(schedule.forward)
        state.note()
        ctx.state, ctx.cuts = state, tuple(cuts)
        end = schedule.stages[schedule.backward[0].at].makes
        ctx.end = end
        return state.at(end).view_as(state.at(end))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state, ctx.state = ctx.state, None
        if state is None:
            raise RuntimeError("a plan's backward pass runs once: retain_graph and double backward are not supported")
        if torch.is_grad_enabled():
            raise RuntimeError("a plan's gradients have no graph: create_graph and double backward are not supported")
        if not gives_all_gradients():
            raise RuntimeError(
                "stages that run by a plan accumulate the gradients of all their parameters: torch.autograd.grad and "
                "backward(inputs=…) are not supported; call backward()"
            )
        state.compare()
        state.gradients[ctx.end] = gradients[0].pop() if isinstance(gradients[0], list) else gradients[0]
        del gradients
        state.run(state.schedule.backward)
        return None, None, None, *(state.gradients.get(cut) for cut in ctx.cuts)


def run_by_plan(schedule: Schedule, cuts: Sequence[int], xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the last stage gives for inputs at some cuts, with a backward pass by the plan.

    Raises:
        CaptureError: the DDP around it looks for unused parameters.
    """
    refuse_searching_ddp()
    note_planned_call()
    # the function must have an input that requires gradients, or autograd never calls its backward pass
    anchor = torch.empty(0, device=xs[0].device).requires_grad_()
    result: torch.Tensor = _Staged.apply(schedule, cuts, anchor, *xs)  # type: ignore[no-untyped-call]
    return result
