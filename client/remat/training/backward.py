"""The backward pass of a planned step: gradients for the caller's hooks, updates by the optimizer, passes in halves.

A hook that runs after a gradient has been accumulated may step an optimizer and free the gradient. Autograd would run
it when the whole planned backward pass has returned, with all gradients there at once. So gradients are given to each
parameter inside the pass, as soon as they are complete (`Delivery`), or used up there by the optimizer (`Release`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from remat_ir import InvalidData

from .. import _compat, generators
from .._compat.gradients import (
    accumulate_by_hand,
    has_gradient_hooks,
    has_hooks_after_accumulation_alone,
    is_used_up,
    run_hooks_after_accumulation,
    used_up,
    when_backward_ends,
    will_accumulate,
)
from ..profiling.fixed import here
from ..profiling.optimizers import drawn, dry_twin, inner, run_step, takes_closure, update_memory

log = logging.getLogger("remat")

IN_PART = (
    "a parameter's hooks have run inside the planned backward pass, and the same loss reads the parameter outside of "
    "the module, so that they saw a part of its gradient: compute all of the loss in the module that is planned"
)

MOST_WAITED_S = 60.0
"""For a pass of another thread."""


class _Pass(threading.local):
    """The backward pass that a thread runs."""

    def __init__(self) -> None:
        self.state: Sequence[torch.Tensor | None] = ()
        self.averaged = self.delivers = False
        self.whole_task = -1
        self.returned: dict[int, torch.Tensor] = {}


class Delivery:
    """What gives gradients to parameters whose hooks free them: `register_post_accumulate_grad_hook`, and no others.

    A backward pass in which a gradient may be in parts, or not be wanted, returns all gradients at its end as autograd
    expects them: another forward pass waits for its own, another thread runs one, `torch.autograd.grad`, hooks on the
    gradient itself, DDP. Where one gives gradients itself, those of other threads begin after it: autograd's own
    accumulation is safe against itself alone.

    Attributes:
        together: it takes the gradients of all parameters, or returns all of them.
        outdated: why plans made until now count too little, for the log, once a hook has been seen to leave a gradient
            there: plans count it from then on. Empty: they do not.
    """

    together = True

    def __init__(self) -> None:
        self.outdated = ""
        self._pass = _Pass()
        self._changed = threading.Condition()
        self._waiting: list[weakref.ref[Any]] = []
        self._running: dict[threading.Thread, tuple[int, bool]] = {}

    def workspace(self, parameter: torch.Tensor) -> int | None:
        """Bytes that a hook is known to take while it runs: none. None where gradients are returned at the end."""
        alone = has_hooks_after_accumulation_alone(parameter) and parameter.grad is None
        return 0 if alone and parameter.is_leaf and parameter.requires_grad and not self.outdated else None

    def before_forward(self, parameters: Sequence[torch.Tensor]) -> None:
        """Every forward pass is taken."""

    def after_forward(self, node: Any, state: Sequence[torch.Tensor | None]) -> None:
        """A step has begun that ends where autograd runs a node; `state` are the trained ones of what it took first."""
        waiting, averaged = weakref.ref(node), _compat.active_ddp() is not None
        with self._changed:
            self._waiting.append(waiting)
        node.register_prehook(lambda _: self._reached(waiting, state, averaged))

    def _reached(self, node: weakref.ref[Any], state: Sequence[torch.Tensor | None], averaged: bool) -> None:
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not node and other() is not None]
        self._pass.state, self._pass.averaged = state, averaged

    def begin(self, positions: Sequence[int]) -> None:
        """The backward pass of the step begins, with gradients for the parameters at these positions.

        Raises:
            RuntimeError: hooks of one of them have run in this very pass, in another planned module.
        """
        task, mine = _compat.backward_task(), self._pass
        parameters = [_held(mine.state[position]) for position in positions]
        thread = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: not any(self._others(thread)), MOST_WAITED_S)
            whole = self._waiting or task == mine.whole_task or mine.averaged or self._others(thread)
            mine.delivers = not whole and all(map(will_accumulate, parameters))
            delivers = mine.delivers or self._running.get(thread) == (task, True)  # several planned calls in one pass
            self._running[thread] = task, delivers
        by_hand: list[Callable[[], None]] = []
        when_backward_ends(partial(self._ended, thread, task, by_hand))
        if not mine.delivers:
            mine.whole_task = task
            return
        for parameter in parameters:
            undo = accumulate_by_hand(parameter, IN_PART)
            if undo is None:
                raise RuntimeError(IN_PART)
            by_hand.append(undo)

    def _others(self, thread: threading.Thread) -> list[bool]:
        """For each backward pass of another thread: whether it gives gradients itself."""
        return [gives for other, (_, gives) in self._running.items() if other is not thread and other.is_alive()]

    def _ended(self, thread: threading.Thread, task: int, by_hand: Sequence[Callable[[], None]]) -> None:
        for undo in by_hand:
            undo()
        with self._changed:
            if self._running.get(thread, (-1, False))[0] == task:
                del self._running[thread]
            self._changed.notify_all()

    @torch.no_grad()
    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Give one parameter its gradient as autograd does, and run its hooks."""
        if not self._pass.delivers:
            self._pass.returned[position] = gradient
            return
        parameter = _held(self._pass.state[position])
        if parameter.grad is not None:
            parameter.grad += gradient
        else:
            parameter.grad = owned(gradient, parameter)
        run_hooks_after_accumulation(parameter)
        if parameter.grad is not None and not self.outdated:
            log.info("a hook leaves its gradient there: the next step is planned with all gradients at its end")
            self.outdated = "gradients that their hooks leave there"

    def end(self, results: Sequence[Any], places: Mapping[int, int]) -> Sequence[Any]:
        """What the backward function returns, with the gradients that were not given away.

        Args:
            places: where the gradient of the parameter at a position stands in the results.
        """
        left, self._pass.returned = self._pass.returned, {}
        if not left:
            return results
        found = list(results)
        for position, gradient in left.items():
            found[places[position]] = gradient
        return tuple(found)


def _held(parameter: torch.Tensor | None) -> torch.Tensor:
    """What a call keeps of the tensors that it took: of those with an update there is always one."""
    assert parameter is not None
    return parameter


def owned(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient as it may stay with a parameter: in its layout, with nothing else in its storage."""
    alone = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if alone and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


USED_UP = (
    "this gradient has been released: remat updated the parameter inside the backward pass, as release_gradients=True "
    "says, and there is nothing to clip, to unscale, to log or to add to; call the model once before each backward "
    "pass, take each parameter into one model alone, and leave out release_gradients where gradients are clipped, "
    "scaled or accumulated"
)


class NotReleasable(RuntimeError):
    """A call whose gradients could not be released exactly: its caller has to change it, its plan is not at fault."""


@dataclass(eq=False)
class _Open:
    """A call that has run forward: where autograd comes to it, trained leaves that it took, whether that has begun."""

    node: weakref.ref[Any]
    state: Sequence[torch.Tensor | None]
    running: bool = False


class Release:
    """The optimizer of one job, one parameter at a time.

    An update runs the step of the optimizer's class for one parameter, with the settings that its group has now and
    the state that the optimizer holds for it: what the step for all parameters would do with it. `optimizer.step()`
    after the backward pass, with the caller's own hooks and schedulers, finds the parameters that are left.

    Attributes:
        together: it takes the gradients of those parameters that the optimizer trains, each by itself.

    Raises:
        InvalidData: the optimizer's step is not one of each parameter by itself; the message says why.
    """

    together = False
    outdated = ""
    """Plans count what an update takes from the beginning, so none becomes outdated."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = inner(optimizer)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise InvalidData(f"release_gradients=True needs optimizer=, a torch.optim.Optimizer, not {optimizer!r}")
        if takes_closure(self.optimizer):
            name = type(self.optimizer).__name__
            raise InvalidData(f"{name} computes gradients inside its step, so they cannot be released before it")
        _refuse_coupled(self.optimizer)
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self._step_of_one = _compat.stand_in(self.optimizer)
        self._workspace: dict[Any, int] = {}
        self._open: list[_Open] = []
        self._begun: _Open | None = None
        self._touched: list[torch.Tensor] = []
        self.optimizer.register_step_pre_hook(lambda *_: self._clear())

    def workspace(self, parameter: torch.Tensor) -> int | None:
        """Bytes that an update of a parameter takes while it runs; None where the optimizer does not train it."""
        group = self._groups.get(id(parameter))
        if group is None or not parameter.is_leaf or not parameter.requires_grad:
            return None
        how = tuple((k, v) for k, v in group.items() if isinstance(v, (bool, int, str, type(None))))
        key = (parameter.shape, parameter.stride(), parameter.dtype, how)
        if key not in self._workspace:
            alone = _compat.stand_in(self.optimizer)
            alone.param_groups = [{**group, "params": [parameter]}]
            self._workspace[key] = update_memory(alone).temporaries_bytes
        return self._workspace[key]

    def before_forward(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse a call whose gradients could not be released exactly.

        Raises:
            NotReleasable: DDP is around the call, there are gradients already, hooks on them, or a forward pass with
                one of the parameters that waits for its backward pass.
        """
        self._clear()
        if _compat.active_ddp() is not None:
            raise NotReleasable(
                "release_gradients=True updates parameters before DistributedDataParallel could average their "
                "gradients over the ranks: leave it out, or use fully_shard"
            )
        self._open = [call for call in self._open if call.node() is not None and not call.running]  # it may still come
        taken = {id(tensor) for call in self._open for tensor in call.state}
        if any(id(parameter) in taken for parameter in parameters):
            raise NotReleasable(
                "release_gradients=True updates parameters in the backward pass, and an earlier forward pass still "
                "waits for its own: call backward() after each forward pass, and evaluate under torch.no_grad()"
            )
        for parameter in parameters:
            if parameter.grad is not None:
                raise NotReleasable(
                    "release_gradients=True, and a parameter has a gradient before the forward pass, to which the new "
                    "one cannot be added: call optimizer.zero_grad() before it"
                )
            if has_gradient_hooks(parameter):
                raise NotReleasable(
                    "release_gradients=True, and a parameter has a hook on its gradient, which would not run: remove "
                    "the hook or leave out release_gradients"
                )

    def after_forward(self, node: Any, state: Sequence[torch.Tensor | None]) -> None:
        """A step has begun that ends where autograd runs a node; `state` are the trained ones of what it took first."""
        leaves = [t if t is not None and t.is_leaf else None for t in state]  # what others made is theirs to free
        call = _Open(weakref.ref(node), leaves)
        self._open.append(call)

        def reached(_: Any) -> None:
            self._begun = call

        node.register_prehook(reached)

    def begin(self, positions: Sequence[int]) -> None:
        """The backward pass of the step begins.

        Raises:
            RuntimeError: it has been run before.
        """
        if self._begun is None or self._begun.running:
            raise RuntimeError(
                "release_gradients=True has updated the parameters of this forward pass: backward() runs once for it"
            )
        self._begun.running = True

    @torch.no_grad()
    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Step one parameter by its gradient, which is the caller's to free."""
        assert self._begun is not None
        parameter = _held(self._begun.state[position])
        group = self._groups[id(parameter)]
        one = self._step_of_one
        one.__dict__.update({k: v for k, v in self.optimizer.__dict__.items() if k not in _compat.STEP_HOOKS})
        one.state, one.param_groups = self.optimizer.state, [{**group, "params": [parameter]}]
        parameter.grad = owned(gradient, parameter)
        try:
            run_step(one)
        finally:
            parameter.grad = used_up(parameter, USED_UP)
            self._touched.append(parameter)

    def end(self, results: Sequence[Any], places: Mapping[int, int]) -> Sequence[Any]:
        """What the backward function returns: no gradient that has been released."""
        return results

    def _clear(self) -> None:
        for parameter in self._touched:
            if is_used_up(parameter.grad):
                parameter.grad = None
        self._touched.clear()


def _refuse_coupled(optimizer: Any) -> None:
    """Run three steps on small copies, of all parameters together and of one after the other: they must be equal.

    Raises:
        InvalidData: they are not, or it cannot be seen.
    """
    name = type(optimizer).__name__
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    found: list[list[torch.Tensor]] = []
    try:
        with generators.Own(), torch.no_grad():
            seeds = [drawn(p, [min(size, 6) for size in p.shape]) for p in map(here, trained)]
            for together in (True, False):
                copies = {id(p): s.clone().requires_grad_() for p, s in zip(trained, seeds, strict=True)}
                twin = dry_twin(optimizer, copies, {})
                groups, seed_of = twin.param_groups, {id(c): s for c, s in zip(copies.values(), seeds, strict=True)}
                for step in range(3):
                    for p, s in zip(copies.values(), seeds, strict=True):
                        p.grad = (s * (step + 1)).sin() if together else None
                    if together:
                        before = [_settings(group) for group in groups]
                        run_step(twin)
                        if [_settings(group) for group in groups] != before:
                            raise InvalidData(
                                f"a step of {name} changes the settings of its groups, for all parameters"
                            )
                        continue
                    for group in groups:
                        for p in reversed(group["params"]):
                            p.grad = (seed_of[id(p)] * (step + 1)).sin()
                            twin.param_groups = [{**group, "params": [p]}]
                            run_step(twin)
                            p.grad = None
                found.append([p.detach() for p in copies.values()])
    except InvalidData:
        raise
    except Exception as error:
        raise InvalidData(f"whether {name} steps each parameter by itself could not be seen: {error}") from error
    if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        raise InvalidData(
            f"a step of {name} for one parameter depends on the others, so that gradients cannot be released one by one"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


Second: TypeAlias = Generator[None, None, Sequence[torch.Tensor | None]]


class Halves:
    """The second halves of one module's backward passes. What they still need is what their functions hold.

    Attributes:
        parameters: those that the gradients are for, by the position of theirs; None: it came with the first half.
        around: is called with the function that runs a second half, in its place.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[torch.Tensor | None] = ()
        self.around: Callable[[Callable[[], None]], None] | None = None
        self._left: Second | None = None

    def first(
        self, function: Callable[[list[Any]], Second], early: Sequence[int], results: int
    ) -> Callable[[list[Any]], tuple[torch.Tensor | None, ...]]:
        """A backward function that stops halfway: of so many results only those at `early` are there."""

        def run(args: list[Any]) -> tuple[torch.Tensor | None, ...]:
            second = function(args)
            next(second)
            found: list[torch.Tensor | None] = [None] * results
            for position, result in zip(early, args, strict=True):
                found[position] = result
            args.clear()
            self._left = second
            return tuple(found)

        return run

    def builder(self) -> Callable[[], None]:
        """The second half of the last backward pass: what `PipelineStage` takes for its `dw_builder`."""
        left, self._left = self._left, None

        def run() -> None:
            if left is not None:
                self._finish(left)

        return lambda: run() if self.around is None else self.around(run)

    @torch.no_grad()  # as autograd runs a backward pass
    def _finish(self, left: Second) -> None:
        try:
            next(left)
        except StopIteration as end:
            gradients = end.value
        seen: set[int] = set()
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            if gradient is None or parameter is None:
                continue
            if parameter.grad is not None:
                parameter.grad += gradient
            else:
                parameter.grad = gradient.clone() if id(gradient) in seen else gradient
                seen.add(id(gradient))
