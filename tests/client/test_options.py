"""Options are checked at the call, wherever they are given: nothing misspelt, wrong or without effect goes through."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.commands import command as command  # a fixture
from client.planners import Noting
from client.small_models import numbers
from remat.planning.options import DEFAULT, SolveOptions, TrainingFields
from remat.planning.planner import planner_for
from remat.planning.sources import GreedyPlanner
from remat.training.enable import plans_of
from remat_ir import Answer, InvalidData, Problem


class Untouched(nn.Module):
    """A module that must not be looked at: whatever is wrong is said before anything is run or captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the module was run")


class Head(nn.Module):
    def forward(self, *ends: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the head was run")


X = torch.ones(4, 4)


def _never() -> nn.Module:
    raise AssertionError("the model was made")


def _callback(module: str) -> Callable[..., Any]:
    def made(**given: Any) -> Any:
        return pytest.importorskip(f"remat.trainers.{module}").RematCallback(**given)

    return made


def _stages() -> nn.Sequential:
    return nn.Sequential(Untouched(), Untouched())


TRAINING: dict[str, Callable[..., Any]] = {
    "optimize": lambda **given: remat.optimize(Untouched(), (X,), **given),
    "enable": lambda **given: remat.enable(Untouched(), **given),
    "enable (several)": lambda **given: remat.enable(nn.ModuleList(_stages()), **given),
    "explain": lambda **given: remat.explain(Untouched(), (X,), **given),
    "RematCallback (lightning)": _callback("lightning"),
    "RematCallback (transformers)": _callback("transformers"),
}
PLANNING: dict[str, Callable[..., Any]] = {
    "backend (eager)": lambda **given: remat.backend(**given),
    "backend (inductor)": lambda **given: remat.backend(inner="inductor", **given),
    "optimize_chain": lambda **given: remat.optimize_chain(_stages(), X, **given),
    "optimize_chain (branches)": lambda **given: remat.optimize_chain(
        [_stages(), _stages()], [X, X], head=Head(), **given
    ),
    "max_batch": lambda **given: remat.max_batch(_never, _never, **given),
}
ALL = TRAINING | PLANNING
BEHIND = {(name, "backend (eager)") for name in ("wait", "on_failure", "most_plans")}
"""Options of training that a backend has."""

BUDGET = "1GiB"


@pytest.mark.parametrize("entry", ALL)
def test_a_misspelt_option_fails_at_the_call_with_the_names_that_exist(entry: str) -> None:
    for word, meant in (("time_limit", "time_limit_s"), ("metod", "method"), ("plannr", "planner")):
        with pytest.raises(InvalidData) as caught:
            ALL[entry](budget=BUDGET, **{word: 5})
        said = f"{entry.partition(' ')[0]} has no option {word}; did you mean {meant}? It takes method, time_lim"
        assert str(caught.value).startswith(said)


WRONG: list[tuple[str, Any]] = [
    ("method", ""),
    ("method", "two words"),
    ("method", 3),
    ("time_limit_s", 0),
    ("time_limit_s", float("nan")),
    ("time_limit_s", float("inf")),
    ("time_limit_s", "5"),
    ("time_limit_s", True),
    ("max_gap", -0.1),
    ("max_gap", 1),
    ("max_gap", None),
    ("slack", 0.9),
    ("slack", float("inf")),
]
WRONG_TRAINING: list[tuple[str, Any]] = [
    ("wait", "no"),
    ("self_check", 1),
    ("on_failure", "ignore"),
    ("on_failure", []),
    ("mode", "chains"),
    ("most_plans", 0),
    ("most_plans", 2.5),
    ("most_plans", True),
]


@pytest.mark.parametrize("entry", ALL)
def test_a_wrong_value_fails_at_the_call(entry: str) -> None:
    """With the option's name and the value; where it means nothing, whatever its value.

    Every wrong value at `enable`, one of each option at the other entries.
    """
    wrong = WRONG + WRONG_TRAINING
    for name, value in wrong if entry == "enable" else dict(wrong).items():
        with pytest.raises(InvalidData) as caught:
            ALL[entry](budget=BUDGET, **{name: value})
        if name in dict(WRONG) or entry in TRAINING or (name, entry) in BEHIND:
            assert re.match(rf"{name} (must be|is one of) ", str(caught.value))
            assert repr(value) in str(caught.value)
            assert caught.value.pointer == f"/{name}"
            with pytest.raises(InvalidData, match=f"^{name} "):
                SolveOptions(**{name: value})
        else:
            assert f"has no option {name}" in str(caught.value)


@pytest.mark.parametrize("entry", PLANNING)
def test_what_has_no_effect_is_refused_in_an_object_as_in_a_keyword(entry: str) -> None:
    given: dict[str, Any] = {
        "wait": False,
        "self_check": False,
        "on_failure": "raise",
        "mode": "chain",
        "most_plans": 2,
    }
    for name, value in given.items():
        if (name, entry) in BEHIND:
            assert getattr(PLANNING[entry](budget=BUDGET, **{name: value}).asking, name) == value
            continue
        fields: Any = {name: value}
        for way in (fields, {"options": SolveOptions(**fields)}):
            with pytest.raises(InvalidData, match=f"has no option {name}"):
                PLANNING[entry](budget=BUDGET, **way)


@pytest.mark.parametrize("entry", ALL)
def test_what_is_no_budget_no_planner_or_no_options_fails_at_the_call(entry: str) -> None:
    for wrong in ({"options": {"time_limit_s": 5}}, {"budget": "much"}, {"planner": "magic"}):
        with pytest.raises(InvalidData):
            ALL[entry](**{"budget": BUDGET, **wrong})


@pytest.mark.parametrize("entry", TRAINING)
def test_what_is_no_optimizer_fails_at_the_call(entry: str) -> None:
    for optimizer in ("adam", torch.optim.Adam, 3):
        with pytest.raises(InvalidData, match="optimizer must be"):
            ALL[entry](budget=BUDGET, optimizer=optimizer)


@pytest.mark.parametrize("entry", TRAINING)
def test_a_chain_has_no_budget_of_units(entry: str) -> None:
    with pytest.raises(InvalidData, match=r"not remat\.UnitBytes"):
        TRAINING[entry](budget=remat.UnitBytes("1GiB", "1MiB"), mode="chain")


@pytest.mark.parametrize("entry", ["optimize_chain", "optimize_chain (branches)", "enable (several)"])
def test_a_budget_of_a_unit_is_none_of_a_whole(entry: str) -> None:
    with pytest.raises(InvalidData, match="bytes"):
        ALL[entry](budget=remat.UnitBytes("1GiB", "1MiB"))


def test_segments_and_plans_that_exist_take_no_options() -> None:
    with pytest.raises(InvalidData, match="options go with a budget"):
        remat.optimize_chain(_stages(), X, segments=2, time_limit_s=5)
    trained = remat.optimize(nn.Linear(4, 4), (X,), budget=BUDGET, planner="greedy")
    with pytest.raises(InvalidData, match="leave them out of explain"):
        remat.explain(trained, time_limit_s=5)


def _small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))


def _trained(planner: Any, **given: Any) -> None:
    model = remat.enable(_small(), budget=remat.Fraction(0.9), planner=planner, **given)
    model(numbers(16, 8)).sum().backward()
    plans_of(model)


def _together(planner: Any, **given: Any) -> None:
    model = _small()
    remat.enable(nn.ModuleList(model), budget=remat.Fraction(0.9), planner=planner, **given)
    for _ in range(5):
        model(numbers(16, 8)).sum().backward()


def _compiled(planner: Any, **given: Any) -> None:
    torch._dynamo.reset()
    backend = remat.backend(remat.Fraction(0.9), planner, **given)
    torch.compile(_small(), backend=backend, dynamic=False)(numbers(16, 8)).sum().backward()


ASKING: dict[str, Callable[..., Any]] = {
    "optimize": lambda planner, **given: remat.optimize(
        _small(), (numbers(16, 8),), budget=remat.Fraction(0.9), planner=planner, **given
    ),
    "optimize, chain": lambda planner, **given: remat.optimize(
        _small(), (numbers(16, 8),), budget=remat.Fraction(1), planner=planner, mode="chain", **given
    ),
    "enable": _trained,
    "backend": _compiled,
    "optimize_chain": lambda planner, **given: remat.optimize_chain(
        _small(), numbers(16, 8), budget=remat.Fraction(1), planner=planner, **given
    ),
    "enable (several)": _together,
    "max_batch": lambda planner, **given: remat.max_batch(
        _small,
        lambda batch: numbers(batch, 8),
        remat.ActivationBytes("100KiB"),
        planner=planner,
        loss=lambda y: y.sum(),
        limit=16,
        **given,
    ),
}


@pytest.mark.parametrize("entry", ASKING)
def test_an_object_and_its_fields_are_the_same(entry: str) -> None:
    """The planner hears what was given, and a keyword counts where both give a field."""
    ways = [
        {"time_limit_s": 3.0, "max_gap": 0.25, "method": "magic"},
        {"options": SolveOptions(time_limit_s=3.0, max_gap=0.25, method="magic")},
        {"options": SolveOptions(time_limit_s=9.0, max_gap=0.25), "time_limit_s": 3.0, "method": "magic"},
    ]
    for given in ways:
        planner = Noting()
        ASKING[entry](planner, **given)
        assert planner.options
        assert {(o.method, o.time_limit_s, o.max_gap) for o in planner.options} == {("magic", 3.0, 0.25)}


def test_a_chain_hears_of_progress_and_takes_the_slack() -> None:
    seen: list[object] = []

    class Telling(GreedyPlanner):
        def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
            on_progress("asked")
            return super().plan(problem, options)

    def budget(slack: float) -> int:
        trained = remat.optimize(
            _small(),
            (numbers(16, 8),),
            budget="1MiB",
            planner=Telling(),
            mode="chain",
            on_progress=seen.append,
            slack=slack,
        )
        (chain,) = remat.plans_of(trained).chains
        return chain.answer.budget_bytes

    assert budget(1.0) - budget(2.0) == 2**19
    assert seen == ["asked", "asked"]


def test_chains_are_kept_as_plans_are() -> None:
    trained = remat.optimize(
        _small(), (numbers(16, 8),), budget=remat.Fraction(1), planner="greedy", mode="chain", most_plans=2
    )
    for rows in (16, 8, 16, 4, 16):
        trained(numbers(rows, 8)).sum().backward()

    def rows_kept() -> set[int]:
        return {chain.chain.activation_bytes[0] // 32 for chain in remat.plans_of(trained).chains}

    assert rows_kept() == {4, 16}, "the one used least lately is dropped"
    trained(numbers(8, 8))
    assert rows_kept() == {8, 16}


def test_every_field_is_a_keyword_and_is_documented() -> None:
    assert set(TrainingFields.__annotations__) == set(SolveOptions.__dataclass_fields__)
    for name in SolveOptions.__dataclass_fields__:
        assert f"        {name}: " in (SolveOptions.__doc__ or "")
    assert remat.SolveOptions is SolveOptions


def test_a_plan_method_that_cannot_be_asked_is_refused() -> None:
    class Old:
        def plan(self, problem: Problem, *, method: str = "auto", time_limit_s: float = 60.0) -> Answer:
            raise AssertionError

    with pytest.raises(InvalidData, match=r"the method `plan` of Old must take \(problem, options, \*, on_progress\)"):
        planner_for(Old())
