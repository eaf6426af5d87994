"""What a planned step does with memory and what it computes again, for a person, before anything is trained."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from remat_ir import (
    Compute,
    Graph,
    InvalidData,
    Plan,
    Verb,
    best_of,
    overhead_of,
    plain_peak,
    readable,
    recomputed,
)

from .. import _compat
from ..capture.call import example_call
from ..capture.operations import notes
from ..chains.modules import ChainedModule
from ..planning.budget import Budget
from ..planning.options import DEFAULT, SolveOptions, TrainingFields, solve_options
from ..planning.planner import Planner
from ..planning.plot import draw_memory, figure_of
from ..planning.sources import OnProgress
from ..planning.summary import (
    headline,
    in_columns,
    journeys_text,
    memory_curve,
    memory_svg,
    moved,
    plain_curve,
    resident,
)
from .enable import Plans, carrier_of, disable, optimize, plans_of
from .memory import device_of_step, summary
from .step import Planned


class Explanation(str):
    """The text of an explanation, and the plans that it is about.

    Attributes:
        plans: of captured steps; chains are in the text alone.
    """

    plans: tuple[Planned, ...]

    def __new__(cls, text: str, plans: tuple[Planned, ...] = ()) -> Explanation:
        made = super().__new__(cls, text)
        made.plans = plans
        return made

    def _repr_html_(self) -> str:
        """For each plan its headline and its memory over the step; then the text."""
        parts = []
        for planned in self.plans:
            graph, answer = planned.step.graph, planned.answer
            line = headline(graph, answer, peak_bytes=planned.predicted_bytes)
            assert answer.plan is not None
            curve = memory_svg(plain_curve(graph), memory_curve(graph, answer.plan), answer.budget_bytes)
            parts.append(f"<p><b>{html.escape(line)}</b></p>{curve}")
        return "".join(parts) + f"<pre>{html.escape(self)}</pre>"

    def plot(self) -> Any:
        """Memory over time with and without the plan, as a `matplotlib` figure, one panel a plan.

        Raises:
            InvalidData: matplotlib is not installed, or there is no plan of a captured step.
        """
        if not self.plans:
            raise InvalidData("there is nothing to plot: no step was captured and planned as a graph")
        figure, panels = figure_of(len(self.plans))
        for axes, planned in zip(panels, self.plans, strict=True):
            graph, answer = planned.step.graph, planned.answer
            assert answer.plan is not None
            draw_memory(axes, graph, answer.plan, answer.budget_bytes, headline(graph, answer))
        return figure


def explain(
    model: nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    depth: int = 3,
    rows: int = 12,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TrainingFields],
) -> Explanation:
    """Memory by module, recomputed ops by module, predicted cost and peak, before anything is trained.

    It is text; a notebook shows memory over the step with it, and its method `plot` draws that with matplotlib.

    Args:
        model: one that `optimize` or `enable` was called for: each of its plans is explained, that of the example
            arguments among them, if any are given. Or any module, with the other arguments of `optimize` but `plan`:
            its step is planned, as there, and explained; nothing is trained, and the plan is remembered.
        depth: how many parts of a module's path tell modules apart.
        rows: the most modules that a table lists.

    Raises:
        InvalidData: a module that has no plan yet, without a budget; or an argument that `optimize` does not take.
        CaptureError, BudgetTooSmall, NothingFound: as `optimize`.
    """
    asking = solve_options(explain, TrainingFields, options, fields)
    if carrier_of(model) is not None:
        trained = plans_of(model)
        if asking != DEFAULT or budget is not None:
            raise InvalidData(
                f"this {type(model).__name__} has a budget and options already, by which its plans are "
                "made: leave them out of explain, or call remat.disable first"
            )
        args, kwargs = example_call(example_args, example_kwargs)
        if args or kwargs:
            trained.plan_for(args, kwargs)
        elif not trained.plans and not trained.chains:
            raise InvalidData(
                f"this {type(model).__name__} has no plan before its first step: train one, or give explain one call "
                "of it, such as remat.explain(model, x)"
            )
        return _explanation(trained, depth, rows)
    if budget is None:
        raise InvalidData(
            "explain takes what remat.optimize or remat.enable was called for, or a module, one call of it and a budget"
        )
    optimize(
        model,
        example_args,
        example_kwargs,
        budget=budget,
        planner=planner,
        optimizer=optimizer,
        ema=ema,
        on_progress=on_progress,
        options=asking,
    )
    try:
        return _explanation(plans_of(model), depth, rows)
    finally:
        disable(model)


def _explanation(trained: Plans, depth: int, rows: int) -> Explanation:
    plans = trained.plans
    parts = [
        "\n".join(filter(None, (explain_plan(planned, depth, rows), summary(trained.peaks, planned))))
        for planned in plans
    ]
    parts += [explain_chain(chain) for chain in trained.chains]
    if trained.unplanned:
        parts.append(f"{trained.unplanned} sizes of graphs run without a plan.")
    return Explanation("\n\n".join(parts), plans)


def explain_chain(trained: ChainedModule) -> str:
    """A chain's plan in words, and which stages run again."""
    chain, answer = trained.chain, trained.answer
    if answer is None:
        return f"{chain.stages} stages by a plan that was given"
    runs = Counter(s.stage for s in trained.plan.steps if s.verb in (Verb.F_ALL, Verb.F_CK, Verb.F_NONE))
    again = {
        f"{n} {type(stage).__name__}": (runs[n] - 1, round((runs[n] - 1) * chain.forward_ns[n - 1] / 1e6))
        for n, stage in enumerate(trained.stages, 1)
        if runs[n] > 1
    }
    cost = answer.cost_ns or 0
    return "\n".join(
        [
            f"a chain of {chain.stages} stages; budget {readable(answer.budget_bytes)} "
            "besides parameters and gradients",
            f"peak {readable(answer.peak_bytes or 0)} predicted; plain training needs {readable(plain_peak(chain))}",
            f"cost {_ms(cost)}, {100 * overhead_of(cost, chain.total_cost_ns):.1f} % over plain: {answer.ending}",
            "",
            _table("computed again", "times", "ms", again, chain.stages, str),
        ]
    )


def explain_plan(planned: Planned, depth: int = 3, rows: int = 12) -> str:
    """One plan in words and two tables."""
    graph, answer = planned.step.graph, planned.answer
    assert isinstance(answer.plan, Plan)
    fixed, plain = graph.fixed_bytes, plain_peak(graph)
    profiled = planned.step.profiled
    gap = "" if answer.gap is None else f", within {100 * answer.gap:.2f} % of {best_of(answer.restricted_to)}"
    budget, cost = answer.budget_bytes, answer.cost_ns or 0
    overhead = 100 * overhead_of(cost, graph.total_cost_ns)
    lines = [
        f"budget {readable(budget)} = fixed {readable(fixed)} + step {readable(budget - fixed)}",
        *_job_lines(planned),
        f"peak {readable(planned.predicted_bytes)} predicted; plain training needs {readable(plain)}",
        *_on_the_device(planned),
        *_on_the_host(graph, answer.plan),
        f"cost {_ms(cost)}, {overhead:.1f} % over plain ({_ms(graph.total_cost_ns)}){gap}: {answer.ending}"
        + ("; on the meta device times say nothing" if device_of_step(planned.step).device.type == "meta" else ""),
        f"{graph.ops} ops, {graph.values} values; {profiled.signatures} kinds of kernels profiled, "
        f"{profiled.shared} of them by somebody before"
        + (f"; {len(profiled.fitted)} kernels timed at other sizes" if profiled.fitted else "")
        + (f"; {len(profiled.neighbours)} kernels not measurable, taken for others" if profiled.neighbours else "")
        + ("" if profiled.spread is None else f"; samples vary by {100 * profiled.spread:.0f} %"),
        *notes(planned.step.operations),
        "",
        _table(
            "where the bytes go", "MiB made", "MiB kept for backward", _memory(planned, answer.plan, depth), rows, _mib
        ),
        "",
        _table("computed again", "times", "ms", _again(planned, answer.plan, depth), rows, str),
    ]
    if graph.link is not None:
        lines += ["", journeys_text(graph, answer.plan, rows) or "nothing moves to the host"]
    return "\n".join(lines)


def _job_lines(planned: Planned) -> list[str]:
    """What of the job takes memory, a line each, and the peak of the optimizer's step."""
    fixed, update = planned.step.fixed, planned.job.update()
    stay = fixed.get("gradients", 0)
    rows = [(name, size, "throughout") for name, size in fixed.items() if size and name != "gradients"]
    made = "made anew by each backward pass" if stay else "made by the backward pass"
    updates = planned.step.operations.updates
    if updates:
        rows.append(("gradients", 0, f"{len(updates)} of them released as they are made"))
    if not updates or planned.gradient_bytes:
        rows.append(("gradients", planned.gradient_bytes, made))
    if stay:
        rows.append(("gradients that stay", stay, "throughout: the step's own are added to them"))
    if planned.job.optimizer is not None:
        temporaries = max(updates.values()) if updates else update.temporaries_bytes
        rows.append(("optimizer step's temporaries", temporaries, "while the optimizer steps"))
    rows.append(("activations", planned.activation_bytes, "at the step's peak, gradients included"))
    lines = [f"{name:<28}  {readable(size):>10}  {when}" for name, size, when in rows]
    if planned.job.optimizer is None:
        return lines
    peak, budget = planned.update_peak_bytes, planned.answer.budget_bytes
    line = f"the optimizer's step peaks at {readable(peak)}"
    over = f", over the budget of {readable(budget)}: {planned.job.advice(peak - budget)}"
    return [*lines, line + (over if peak > budget else "")]


def _on_the_device(planned: Planned) -> list[str]:
    memory = planned.memory
    if memory is None:
        return []
    said = zip(("requested", "allocated", "reserved"), memory, strict=True)
    return ["on the device, with all of this process: " + ", ".join(f"{readable(n)} {what}" for what, n in said)]


def _on_the_host(graph: Graph, plan: Plan) -> list[str]:
    link, away = graph.link, moved(graph, plan)
    if link is None:
        return []
    limit = "" if link.host_bytes is None else f", which may hold {readable(link.host_bytes)}"
    speeds = f"{link.to_host_bytes_per_s / 1e9:.1f} GB/s out, {link.to_device_bytes_per_s / 1e9:.1f} GB/s back"
    return [
        f"{away or 'nothing offloaded'}; the link to the host{limit}: {speeds}, {link.latency_ns / 1e3:.0f} µs a copy"
    ]


def _memory(planned: Planned, plan: Plan, depth: int) -> dict[str, tuple[int, int]]:
    """By module: bytes that its forward ops make, and those of them that are resident when the backward pass begins."""
    graph = planned.step.graph
    kept = resident_at_boundary(graph, plan)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for value, op in enumerate(graph.value_op):
        if graph.backward_from is not None and op < graph.backward_from:
            row = found[_module(planned, op, depth)]
            row[0] += graph.value_bytes[value]
            row[1] += graph.value_bytes[value] * (value in kept)
    return {name: (row[0], row[1]) for name, row in found.items()}


def _again(planned: Planned, plan: Plan, depth: int) -> dict[str, tuple[int, int]]:
    """By module: how many computations are repeated, and their time in ms."""
    graph = planned.step.graph
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for op, times in enumerate(recomputed(plan, graph.ops)):
        if times:
            row = found[_module(planned, op, depth)]
            row[0] += times
            row[1] += times * graph.op_cost_ns[op]
    return {name: (row[0], round(row[1] / 1e6)) for name, row in found.items()}


def resident_at_boundary(graph: Graph, plan: Plan) -> frozenset[int]:
    """The values that a plan has there when the backward pass begins."""
    turn = (at for at, step in enumerate(plan.steps) if isinstance(step, Compute) and step.op == graph.backward_from)
    return frozenset(resident(graph, plan.steps[: next(turn, None)]))


def _module(planned: Planned, op: int, depth: int) -> str:
    nodes = planned.step.operations.ops[op].nodes
    path = _compat.module_path(nodes[0]) if nodes else ""
    return ".".join(path.split(".")[:depth]) or "(no module)"


def _table(
    title: str, first: str, second: str, found: dict[str, tuple[int, int]], rows: int, show: Callable[[int], str]
) -> str:
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    shown = [(name, show(a), show(b)) for name, (a, b) in ordered[:rows]]
    if len(ordered) > rows:
        rest = ordered[rows:]
        shown.append((f"{len(rest)} more", show(sum(r[1][0] for r in rest)), show(sum(r[1][1] for r in rest))))
    return in_columns([(title, first, second), *shown])


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
