"""How a plan is asked for and what training does with it: one object or its fields, checked at the call."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from remat_ir import InvalidData, Link

from ..settings import settings
from .links import read_link

OnFailure: TypeAlias = Literal["raise", "plain"]
Mode: TypeAlias = Literal["auto", "graph", "chain"]
LONGEST_NAME = 100
"""Characters of a solve's name."""


def _check(name: str, value: object, fine: bool, must: str) -> None:
    if not fine:
        raise InvalidData(f"{name} {must}, not {value!r}", f"/{name}")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class SolveOptions:
    """The options of `optimize`, `enable` and of all that asks for plans; each field may be given as a keyword, too.

    Example:
        >>> SolveOptions(time_limit_s=300, max_gap=0)
        SolveOptions(method='auto', time_limit_s=300, max_gap=0, slack=1.0, wait=True, self_check=True, \
on_failure='plain', strict=False, mode='auto', most_plans=64, steps=10000, functional_ops=(), link=None, \
host_bytes=None, accumulate=1, clip_grad_norm=False, release_gradients=False, \
recompute_collectives=None, name=None)

    Attributes:
        method: of the solver; "auto" combines them. The client's own greedy plan takes no notice of it.
        time_limit_s: seconds for each solve, more than 0; time in a service's queue does not count.
        max_gap: a solve ends when (cost − bound) / cost is no larger; at least 0 and below 1.
        slack: bytes reserved over bytes allocated, where a budget is bytes of a device; at least 1.
        wait: False starts training on a quick plan: one that this machine remembers, the client's greedy one, or where
            that does not fit, the first that the planner has. The planner's answer takes over at the start of a later
            step, once it is there. True waits for the first plan of a module; later sizes start as with False.
        self_check: whether the first step of each plan measures its peak, and warns where it is off by more than 3 %.
            Chains have no such check.
        on_failure: what to do where a part of a step cannot be planned: run it "plain", as torch does, and log a
            warning; or "raise".
        strict: whether a planner that fails is an error, and no other's plan is taken in its place; REMAT_STRICT=1
            says so for all calls.
        ranks: whether the processes of torch.distributed plan together: True for all of them, or a process group. The
            first measures and asks, and all run the same plan, once each has found that it poses the same problem. They
            must then plan the same steps in the same order. False: each plans for itself.
        mode: "graph" captures the step as one graph; "chain" runs the stages of an `nn.Sequential` one after the other,
            with any Python inside (LSTM, branches on data): see `remat.optimize_chain`; "auto" takes graphs, and the
            chain where a Sequential of one tensor is no single graph.
        most_plans: how many sizes of a graph keep their plan, at least 1; beyond, the one used least lately is planned
            anew. All sizes share one captured graph, some megabytes of a large model's memory on the host.
        steps: how many steps of training will run by the plan, or None. A solve ends, after a second at least, when all
            that they could still gain by a better plan is less than the time that was spent on it. None, or max_gap=0,
            goes on until the gap or the time limit.
        functional_ops: names of custom operators, as "namespace::name", that a plan may run again: the same inputs give
            the same outputs, and nothing else changes. Any other custom operator runs once in a step.
        link: over which values may move to the host and back: "measured", that of the step's device, measured once in a
            process; a name such as "pcie5" or "h100", whose numbers are declared; "25GB" a second, a .json file, or a
            `remat_ir.Link` with its own.
            Without one nothing moves.
        host_bytes: what the host may hold at most, as a size such as "64GiB"; None without a limit.
        accumulate: how many backward passes there are to a step of the optimizer, at least 1; beyond 1 gradients that
            stay are counted from the first call on. Without it a budget in bytes is planned for anew where gradients
            are found.
        clip_grad_norm: whether `torch.nn.utils.clip_grad_norm_` runs before the optimizer's step, whose memory counts.
        release_gradients: whether each parameter is updated inside the backward pass as soon as its gradient is
            complete, by `optimizer=`, and the gradient is freed; not with accumulation or clipping.
        recompute_collectives: whether a plan of all ranks (`ranks=True`) may run a collective again: True,
            False, or None, where that costs no more than a kernel of its size. Ranks that plan apart run each once.
        name: what the solve is called in the lists of a service, 1 to 100 printable characters; it is sent there. None
            sends no name, but with REMAT_SEND_NAMES=1 the model's class and the shape of its first input.

    Raises:
        InvalidData: a value out of range; the message names the option, the value and what it must be.
    """

    method: str = "auto"
    time_limit_s: float = 60.0
    max_gap: float = 0.001
    slack: float = 1.0
    wait: bool = True
    self_check: bool = True
    on_failure: OnFailure = "plain"
    strict: bool = False
    ranks: Any = field(default=False, repr=False)
    mode: Mode = "auto"
    most_plans: int = 64
    steps: int | None = 10_000
    functional_ops: tuple[str, ...] = ()
    link: str | Link | None = None
    host_bytes: int | str | None = None
    accumulate: int = 1
    clip_grad_norm: bool = False
    release_gradients: bool = False
    recompute_collectives: bool | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        method = self.method
        named = isinstance(method, str) and re.fullmatch(r"[A-Za-z][\w.+-]*", method) is not None
        _check("method", method, named, "must be the name of a method, such as 'auto'")
        limit, gap, slack = self.time_limit_s, self.max_gap, self.slack
        _check("time_limit_s", limit, _number(limit) and limit > 0, "must be a positive number of seconds")
        _check("max_gap", gap, _number(gap) and 0 <= gap < 1, "must be at least 0 and below 1")
        _check("slack", slack, _number(slack) and slack >= 1, "must be a number of at least 1")
        for name in ("wait", "self_check", "strict", "clip_grad_norm", "release_gradients"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, bool), "must be True or False")
        group = isinstance(self.ranks, bool) or callable(getattr(self.ranks, "rank", None))
        _check("ranks", self.ranks, group, "must be True, False or a process group")
        again = self.recompute_collectives
        _check("recompute_collectives", again, again is None or isinstance(again, bool), "must be True, False or None")
        for name, values in (("on_failure", get_args(OnFailure)), ("mode", get_args(Mode))):
            value = getattr(self, name)
            _check(name, value, isinstance(value, str) and value in values, f"is one of {', '.join(map(repr, values))}")
        for name in ("most_plans", "accumulate", "steps"):
            count = getattr(self, name)
            if name == "steps" and count is None:
                continue
            fine = isinstance(count, int) and not isinstance(count, bool) and count >= 1
            _check(name, count, fine, "must be an integer of at least 1")
        for name, with_it in (("accumulate", self.accumulate > 1), ("clip_grad_norm", self.clip_grad_norm)):
            if self.release_gradients and with_it:
                raise InvalidData(f"release_gradients does not go with {name}, which needs all gradients at once")
        read_link(self.link, self.host_bytes)
        called, most = self.name, LONGEST_NAME
        fine = called is None or (isinstance(called, str) and 0 < len(called) <= most and called.isprintable())
        _check("name", called, fine, f"must be 1 to {most} printable characters")
        ops = self.functional_ops
        named = isinstance(ops, tuple) and all(isinstance(o, str) and re.fullmatch(r"\w+::[\w.]+", o) for o in ops)
        _check("functional_ops", ops, named, "must be a tuple of operators' names, such as ('mylib::op',)")


class SolveFields(TypedDict, total=False):
    """The fields of `SolveOptions` that concern the solve of a problem, whose budget is what it is."""

    method: str
    time_limit_s: float
    max_gap: float
    name: str | None


class PlanFields(SolveFields, total=False):
    """The fields of `SolveOptions` that concern the plan."""

    slack: float
    steps: int | None
    strict: bool
    ranks: Any


class StepFields(PlanFields, total=False):
    """The fields of `SolveOptions` that concern the graph of a captured step and its plan."""

    functional_ops: tuple[str, ...]
    link: str | Link | None
    host_bytes: int | str | None
    recompute_collectives: bool | None


class BackendFields(StepFields, total=False):
    """The fields of `SolveOptions` that a backend for `torch.compile` has."""

    wait: bool
    on_failure: OnFailure
    most_plans: int


class TrainingFields(BackendFields, total=False):
    """All fields of `SolveOptions`: how a plan is asked for, and what training does with it."""

    self_check: bool
    mode: Mode
    accumulate: int
    clip_grad_norm: bool
    release_gradients: bool


DEFAULT = SolveOptions()


def solve_options(
    what: Callable[..., object],
    takes: type[SolveFields],
    options: SolveOptions | None,
    given: Mapping[str, Any],
    *,
    default: SolveOptions = DEFAULT,
) -> SolveOptions:
    """The options of a call: the object, or `default` without one, and keywords in place of its fields.

    Args:
        what: the function or class that was called; its parameters are named where a keyword is misspelt.
        takes: the fields that mean something there.
        given: the call's other keywords.

    Raises:
        InvalidData: a keyword that is none of its options, an object with a field set that means nothing there, or a
            value out of range.
    """
    known = tuple(takes.__annotations__)
    name = what.__name__
    for word in given:
        if word not in known:
            raise InvalidData(f"{name} has no option {word}{_meant(word, known, what)} It takes {', '.join(known)}")
    if options is None:
        return replace(default, **given)
    if not isinstance(options, SolveOptions):
        raise InvalidData(f"options of {name} must be a remat.SolveOptions, not {options!r}")
    for each in fields(options):
        if each.name not in known and getattr(options, each.name) != each.default:
            raise InvalidData(f"{name} has no option {each.name}, which is set in options. It takes {', '.join(known)}")
    return replace(options, **given)


def with_name(options: SolveOptions, name: str) -> SolveOptions:
    """Options with a name that was not given, where the settings say that such names may be sent."""
    return options if options.name is not None or not settings().send_names else replace(options, name=name)


def _meant(word: str, known: tuple[str, ...], what: Callable[..., object]) -> str:
    others = [p.name for p in inspect.signature(what).parameters.values() if p.kind is not p.VAR_KEYWORD]
    near = difflib.get_close_matches(word, [*known, *others], 1)
    return f"; did you mean {near[0]}?" if near else "."
