"""Every option of every method has an effect: on the programs that engines get, on the plans, or on the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any

import pytest
from benchmarks.graphs.instances import instance

from remat_ir import Answer, InvalidData, Link, Problem, Progress, budget_at
from remat_solver import METHODS, solve
from remat_solver.backends.engine import Engine
from remat_solver.baselines.heuristics import BASELINES
from solver.little import little_graph
from solver.test_baselines import unit
from solver.test_rotor import long_chain

GRAPH = little_graph(3, 16)
LINK = Link(10**9, 10**9)


class Watch:
    """What engines were asked for while a problem was solved, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[tuple[str, int]] = []
        self.first = b""
        self.asked: list[dict[str, Any]] = []
        self.sources: set[str] = set()
        self.costs: list[int | None] = []
        self.answer: Answer | None = None
        begin, ask = Engine.__init__, Engine._ask

        def started(engine: Engine, name: str, *, memory_bytes: int = 0) -> None:
            self.engines.append((name, memory_bytes))
            begin(engine, name, memory_bytes=memory_bytes)

        def asked(engine: Engine, kind: str, program: Any, members: dict[str, Any], *rest: Any) -> Any:
            self.first = self.first or b"".join(
                getattr(program, field.name).tobytes() for field in fields(program)[:-1]
            )
            self.asked.append(dict(members))
            return ask(engine, kind, program, members, *rest)

        monkeypatch.setattr(Engine, "__init__", started)
        monkeypatch.setattr(Engine, "_ask", asked)

    def solve(self, method: str, problem: Problem, options: dict[str, object]) -> Watch:
        def note(news: Progress) -> None:
            self.sources.add(news.source)
            self.costs.append(news.cost_ns)

        self.answer = solve(
            problem,
            method=method,
            time_limit_s=2.0,
            max_gap=0,
            options=options,
            on_progress=note,
            certify=True,
        )
        return self


Seen = Callable[[Watch], object]


def engines(watch: Watch) -> object:
    return watch.engines[0]


def asked(name: str) -> Seen:
    return lambda watch: watch.asked[0][name]


def count(watch: Watch) -> object:
    return len(watch.asked)


def sources(name: str) -> Seen:
    return lambda watch: name in watch.sources


first_program: Seen = attrgetter("first")
costs: Seen = attrgetter("costs")


def said(name: str) -> Seen:
    return attrgetter(f"answer.{name}")


DEEP = instance("unet-2-whole")
TIGHT = Problem(DEEP, budget_at(DEEP, 0.4))
SMALL = Problem(GRAPH, budget_at(GRAPH, 0.6))
CHAIN = long_chain(20, 5)
CHAINED = Problem(CHAIN, budget_at(CHAIN, 0.3))
ROUNDED = Problem(little_graph(10, 14), budget_at(little_graph(10, 14), 0.6))
LINKED = Problem(DEEP.with_link(LINK), TIGHT.budget_bytes)
OFFLOADED = Problem(replace(CHAIN, link_bytes_per_s=10**9), CHAINED.budget_bytes)
MEMORY = (2**31, engines)
MILP: dict[str, tuple[object, Seen]] = {
    "engine": ("cbc", engines),
    "recomputations": (2, first_program),
    "threads": (2, asked("threads")),
    "seed": (1, asked("seed")),
    "memory_bytes": MEMORY,
}
BASE: dict[str, tuple[object, Seen]] = {"freeing": ("paper", said("plan"))}
EFFECTS: dict[str, dict[str, tuple[object, Seen]]] = {
    **dict.fromkeys(sorted(set(BASELINES) - {"griewank"}), BASE),
    "auto": {
        "search": (False, sources("search")),
        "proof": (False, engines),
        "seed": (1, said("plan")),
        "memory_bytes": MEMORY,
        "deterministic": (True, said("message")),
    },
    "staged": {
        "polish": (False, costs),
        "memory_bytes": MEMORY,
    },
    "milp": MILP,
    "milp-tight": MILP,
    "milp-forward": MILP | {"recomputations": (2, said("message"))},
    "milp-order": MILP | {"recomputations": (2, said("message")), "most_ops": (8, said("message"))},
    "lp-rounding": {
        "epsilon": (0.1, count),
        "threshold": (0.99, costs),
        "program": ("checkmate", first_program),
        "tries": (1, count),
        "memory_bytes": MEMORY,
    },
    "greedy": {"tries": (1, said("cost_ns"))},
    "search": {"seed": (1, said("plan")), "iterations": (2000, said("plan"))},
    "rotor": {"slots": (8, said("cost_ns"))},
    "revolve": {"slots": (8, said("cost_ns"))},
    "sequential": {"segments": (3, said("cost_ns"))},
    "pofo": {"slots": (8, said("cost_ns"))},
    "tags": {"seed": (1, costs), "free": (False, said("message"))},
    "transfers": {"proof": (False, engines), "seed": (1, said("plan")), "memory_bytes": MEMORY},
}
LINEAR = Problem(unit(25), budget_at(unit(25), 0.5))
POSED = {
    **dict.fromkeys(BASELINES, LINEAR),
    "auto": TIGHT,
    "staged": TIGHT,
    "lp-rounding": ROUNDED,
    "greedy": Problem(DEEP, budget_at(DEEP, 0.6)),
    "search": TIGHT,
    "rotor": CHAINED,
    "revolve": CHAINED,
    "sequential": Problem(CHAIN, budget_at(CHAIN, 0.8)),
    "pofo": OFFLOADED,
    "tags": TIGHT,
    "transfers": LINKED,
}


MILPS = {method for method, options in EFFECTS.items() if MILP.keys() <= options.keys()}
"""Share options: those of all of them are looked at in two, since every program gets them by the same way."""


def test_every_option_is_looked_at() -> None:
    with_options = {name: {field.name for field in fields(method.options)} for name, method in METHODS.items()}
    assert {name: set(options) for name, options in EFFECTS.items()} == {
        name: options for name, options in with_options.items() if options
    }


@cache
def watched(method: str, problem: Problem, option: str | None = None) -> Watch | str:
    """A solve with the defaults, or with another value of one option; or why that is refused."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            return Watch(patch).solve(method, problem, {option: EFFECTS[method][option][0]} if option else {})
        except InvalidData as error:
            return str(error)


@pytest.mark.parametrize(
    ("method", "option", "value", "says"),
    [
        ("rotor", "slots", 0, "slots must be an integer from 1 to 20000, not 0"),
        ("search", "iterations", True, "iterations must be an integer from 1, not True"),
        ("search", "iterations", 0, "iterations must be an integer from 1, not 0"),
        ("search", "seed", -1, "seed must be an integer from 0"),
        ("search", "seed", "x", "seed must be an integer from 0"),
        ("staged", "engine", "cpsat", "method 'staged' has no option 'engine'; it has memory_bytes, polish"),
        ("auto", "proof", 1, "proof must be true or false, not 1"),
        ("lp-rounding", "epsilon", None, ""),
        ("lp-rounding", "epsilon", "a", "epsilon must be at least 0 and below 1, not 'a'"),
        ("lp-rounding", "epsilon", 1.0, "epsilon must be at least 0 and below 1, not 1.0"),
        ("lp-rounding", "threshold", -0.1, "threshold must be at least 0 and below 1, not -0.1"),
        ("lp-rounding", "program", "best", "program must be one of tight, checkmate, not 'best'"),
        ("lp-rounding", "tries", 0, "tries must be an integer from 1, not 0"),
        ("lp-rounding", "seed", 1, "has no option 'seed'"),
        ("milp", "engine", "glpk", "engine must be one of highs, cbc, not 'glpk'"),
        ("milp", "seed", None, "seed must be an integer from 0 to 2147483646, not None"),
        ("milp-tight", "recomputations", 0, "recomputations must be an integer from 1 to 8, not 0"),
        ("milp-tight", "recomputations", "2", "recomputations must be an integer from 1 to 8, not '2'"),
        ("milp-tight", "threads", True, "threads must be an integer from 1 to 64, not True"),
        ("milp-tight", "no_such", 1, "has no option 'no_such'; it has engine"),
    ],
)
def test_a_value_that_an_option_does_not_take(method: str, option: str, value: object, says: str) -> None:
    """The message says what it takes; None goes where it is the default."""
    if not says:
        assert getattr(METHODS[method].read_options({option: value}), option) == value
        return
    with pytest.raises(InvalidData, match=says):
        METHODS[method].read_options({option: value})


QUICK = {"milp-tight", "greedy", "rotor", "pofo", "sequential", "ap-sqrt", "search", "lp-rounding"}
"""Each kind of options by one method whose solves end at once; `make test-thorough` looks at all."""


@pytest.mark.parametrize(
    ("method", "option"),
    [
        pytest.param(method, option, marks=() if method in QUICK else pytest.mark.thorough)
        for method, options in EFFECTS.items()
        for option in options
        if method in ("milp-tight", "milp-order") or method not in MILPS or option not in MILP
    ],
)
def test_every_option_has_an_effect(method: str, option: str) -> None:
    problem = POSED.get(method, SMALL)
    _, seen = EFFECTS[method][option]
    without, with_it = (
        watch if isinstance(watch, str) else seen(watch) if watch.engines or seen is not engines else None
        for watch in (watched(method, problem), watched(method, problem, option))
    )
    assert without != with_it


@pytest.mark.thorough
def test_the_memory_that_auto_is_given_is_that_of_every_engine_with_a_link_too() -> None:
    """Of the one that bounds plans with transfers, and of the one beside it."""
    found = watched("auto", LINKED, "memory_bytes")
    assert isinstance(found, Watch)
    assert {memory for _, memory in found.engines} == {MEMORY[0]}
