"""Memory over the time of a step, drawn with matplotlib where that is installed."""

from __future__ import annotations

from typing import Any, NamedTuple

from remat_ir import Answer, AnyPlan, Chain, InvalidData, Problem, Subject, plain_plan_of, replay_any


class Run(NamedTuple):
    """One run of an op: when, the bytes that are there meanwhile, and whether it ran before."""

    op: int | None
    start_ns: int
    end_ns: int
    memory_bytes: int
    again: bool


def runs(subject: Subject, plan: AnyPlan) -> list[Run]:
    """What runs in a plan, in order; copies that overlap take no time of their own.

    Raises:
        InvalidPlan: the plan is not one of the subject, or breaks a rule.
    """
    found, seen, before = [], set[int](), 0
    for moment in replay_any(subject, plan):
        if moment.op is not None or moment.cost_ns > before:
            found.append(Run(moment.op, before, moment.cost_ns, moment.peak_bytes, moment.op in seen))
        if moment.op is not None:
            seen.add(moment.op)
        before = moment.cost_ns
    return found


def figure_of(panels: int, height: float = 3.6, otherwise: str = "") -> tuple[Any, list[Any]]:
    """A matplotlib figure with panels below each other, so many inches high each, and their axes.

    Raises:
        InvalidData: matplotlib is not installed; the message ends in what to do `otherwise`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidData(
            f"pictures need matplotlib; run pip install '.[plot]' in a clone of remat{otherwise}"
        ) from None
    figure = Figure(figsize=(9, height * panels), layout="constrained")
    return figure, list(figure.subplots(panels, squeeze=False)[:, 0])


def draw_memory(axes: Any, subject: Subject, plan: AnyPlan, budget_bytes: int, title: str = "") -> None:
    """Draw memory in MiB over ms, without and with a plan, on matplotlib axes.

    With it: the budget, the forward/backward boundary, and the times at which ops run again.

    Raises:
        InvalidPlan: the plan is not one of the subject, or breaks a rule.
    """
    planned = runs(subject, plan)
    for label, color, found in (
        ("without a plan", "#999999", runs(subject, plain_plan_of(subject))),
        ("plan", "#1d4ed8", planned),
    ):
        edges = [0.0, *(run.end_ns / 1e6 for run in found)]
        axes.stairs([run.memory_bytes / 2**20 for run in found], edges, label=label, color=color, linewidth=1.2)
    axes.axhline(budget_bytes / 2**20, color="crimson", linestyle="--", linewidth=1, label="budget")
    first = subject.stages if isinstance(subject, Chain) else getattr(subject, "backward_from", None)
    start = next((run.start_ns for run in planned if first is not None and (run.op or 0) >= first), None)
    if start is not None:
        axes.axvline(start / 1e6, color="black", linestyle=":", linewidth=1, label="backward pass begins")
    again = [(run.start_ns / 1e6, (run.end_ns - run.start_ns) / 1e6) for run in planned if run.again]
    if again:
        axes.broken_barh(
            again,
            (0, 1),
            transform=axes.get_xaxis_transform(),
            color="#f59e0b",
            alpha=0.3,
            linewidth=0,
            label="run again",
        )
    axes.set(xlabel="time in ms", ylabel="memory in MiB", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def plot(problem: Problem, answer: Answer) -> Any:
    """Memory over time by an answer's plan and without it, as a `matplotlib` figure, which a notebook shows.

    With it are drawn the budget, the forward/backward boundary, and the times at which ops run again.

    Args:
        problem: the one that is answered; an answer does not have its graph.

    Raises:
        InvalidData: there is no plan, or matplotlib is not installed.
        InvalidPlan: the plan is not one of this problem's subject.

    >>> from remat_ir import graph_of, plain_plan
    >>> problem = Problem(graph_of([1, 2], [4, 8], [[], [0]]), 12)
    >>> len(plot(problem, Answer.of_plan(problem, plain_plan(problem.graph), method="greedy")).axes)
    1
    """
    if answer.plan is None:
        raise InvalidData(f"there is nothing to plot: the answer has no plan ({answer.ending})")
    figure, (axes,) = figure_of(1)
    draw_memory(axes, problem.subject, answer.plan, answer.budget_bytes, f"{answer.method}: {answer.ending}")
    return figure
