"""A plan for people: its line, its memory over the steps, and what it moves to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remat_ir import (
    Answer,
    AnyPlan,
    Compute,
    Drop,
    Free,
    Graph,
    Offload,
    Plan,
    Prefetch,
    Step,
    Subject,
    host_peak,
    overhead_of,
    plain_peak,
    plain_plan_of,
    readable,
    replay,
    replay_any,
)

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def headline(
    subject: Subject,
    answer: Answer,
    *,
    peak_bytes: int | None = None,
    seconds: float | None = None,
    url: str | None = None,
) -> str:
    """One line such as `12.0 → 6.1 GiB (−49 %), +7.1 % time, within 0.08 % of optimal (certified), 8 s; http://…`.

    A bound that nobody certified is named with who claims it, in place of "certified".

    Args:
        peak_bytes: of the step as it runs; None takes the plan's.
        seconds: from the call to the plan; None takes those of the solve.
        url: of the solve's page, where a service has one.

    >>> from remat_ir import Problem, graph_of, plain_plan
    >>> graph = graph_of([1, 2, 3], [4096, 5120, 6144], [[], [0], [0, 1]])
    >>> print(headline(graph, Answer.of_plan(Problem(graph, 15360), plain_plan(graph), method="auto")))
    15.0 → 15.0 KiB (−0 %), +0.0 % time, optimal (certified), 0 s
    """
    took = f"{answer.seconds if seconds is None else seconds:.0f} s{f'; {url}' if url else ''}"
    plain, peak = plain_peak(subject), peak_bytes if peak_bytes is not None else answer.peak_bytes
    if answer.cost_ns is None or peak is None:
        return f"no plan: {answer.ending}, {took}"
    power = max(0, min(len(_UNITS) - 1, (max(plain, 1).bit_length() - 1) // 10))
    sizes = f"{plain / 1024**power:.1f} → {peak / 1024**power:.1f} {_UNITS[power]}"
    saved = 1 - peak / plain if plain else 0.0
    share = f"{'−' if saved >= 0 else '+'}{100 * abs(saved):.0f} %"
    more = 100 * overhead_of(answer.cost_ns, subject.total_cost_ns)
    within = f" among plans restricted to {', '.join(answer.restricted_to)}" if answer.restricted_to else ""
    if answer.gap is None:
        best = ""
    else:
        close = "optimal" if answer.gap == 0 else f"within {100 * answer.gap:.2g} % of optimal"
        best = f", {close}{within} ({f'claimed by {answer.claimed_by}' if rests_on_claim(answer) else 'certified'})"
    away = moved(subject, answer.plan)
    return f"{sizes} ({share}){away and ', '}{away}, {more:+.1f} % time{best}, {took}"


def rests_on_claim(answer: Answer) -> bool:
    """Whether the bound of an answer is somebody's word, without a certificate."""
    claimed, bound = answer.claimed_bound_ns, answer.bound_ns
    return answer.claimed_by is not None and claimed is not None and (bound is None or claimed <= bound)


WIDTH, HEIGHT = 640, 180


def memory_curve(subject: Subject, plan: AnyPlan) -> list[int]:
    """[computes] the memory in bytes while each of the plan's ops runs, fixed bytes included.

    Raises:
        InvalidPlan: the plan breaks a rule.
    """
    return [moment.peak_bytes for moment in replay_any(subject, plan) if moment.op is not None]


def plain_curve(subject: Subject) -> list[int]:
    """The memory curve without rematerialization."""
    return memory_curve(subject, plain_plan_of(subject))


def memory_svg(plain: Sequence[int], planned: Sequence[int], budget: int) -> str:
    """Both curves and the budget as an SVG element: time to the right, bytes upwards, from 0."""
    most = max(*plain, *planned, budget, 1)

    def y(size: int) -> float:
        return round(HEIGHT - 4 - (HEIGHT - 8) * size / most, 1)

    def line(curve: Sequence[int], style: str) -> str:
        last = max(1, len(curve) - 1)
        points = " ".join(f"{round(WIDTH * i / last, 1)},{y(size)}" for i, size in enumerate(curve))
        return f'<polyline points="{points}" fill="none" {style}/>'

    dashes = 'stroke="crimson" stroke-dasharray="6 4"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'aria-label="Memory over the step: grey without a plan, blue by the plan, dashed the budget">'
        + line(plain, 'stroke="#999999"')
        + line(planned, 'stroke="#1d4ed8" stroke-width="1.5"')
        + f'<line x1="0" x2="{WIDTH}" y1="{y(budget)}" y2="{y(budget)}" {dashes}/></svg>'
    )


def moved(subject: Subject, plan: object) -> str:
    """What a plan keeps on the host, in words; empty where it moves nothing.

    >>> from remat_ir import graph_of, plain_plan
    >>> moved(graph_of([1], [1], [[]]), plain_plan(graph_of([1], [1], [[]])))
    ''
    """
    if not isinstance(subject, Graph) or not isinstance(plan, Plan) or subject.link is None:
        return ""
    values = [step.value for step in plan.steps if isinstance(step, Offload)]
    if not values:
        return ""
    size = sum(subject.value_bytes[value] for value in values)
    return f"{readable(size)} offloaded, {readable(host_peak(subject, plan))} on the host"


class Journey(NamedTuple):
    """A value's stay on the host: when it is copied out, and back, in ns from the step's start; None: it is not."""

    value: int
    out_ns: tuple[int, int]
    back_ns: tuple[int, int] | None


def journeys(graph: Graph, plan: Plan) -> list[Journey]:
    """The stays on the host of a plan's values, in the order in which they begin."""
    found: list[Journey] = []
    latest: dict[int, int] = {}
    for moment in replay(graph, plan):
        step = plan.steps[moment.step]
        if isinstance(step, Offload):
            assert moment.copy_ns is not None
            latest[step.value] = len(found)
            found.append(Journey(step.value, moment.copy_ns, None))
        elif isinstance(step, Prefetch):
            found[latest[step.value]] = found[latest[step.value]]._replace(back_ns=moment.copy_ns)
    return found


def journeys_text(graph: Graph, plan: Plan, rows: int = 12) -> str:
    """What moves and when, the first `rows` stays on the host, a line each; empty where nothing moves."""
    found = journeys(graph, plan)
    if not found:
        return ""
    lines = [("moved to the host", "size", "out, ms", "back, ms")]
    for value, out, back in found[:rows]:
        made = graph.op_label(graph.value_op[value])
        lines.append((made, readable(graph.value_bytes[value]), _span(out), "" if back is None else _span(back)))
    if len(found) > rows:
        rest = sum(graph.value_bytes[journey.value] for journey in found[rows:])
        lines.append((f"{len(found) - rows} more", readable(rest), "", ""))
    return in_columns(lines)


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of text, their first cells to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )


def resident(graph: Graph, steps: Iterable[Step]) -> set[int]:
    """The values that are there once these first steps of a plan have run."""
    found: set[int] = set()
    for step in steps:
        if isinstance(step, Compute):
            found.update(graph.op_always[step.op] if step.kept is None else step.kept)
        elif isinstance(step, Free | Drop):
            found.discard(step.value)
        elif isinstance(step, Prefetch):
            found.add(step.value)
    return found


def _span(span: tuple[int, int]) -> str:
    return f"{span[0] / 1e6:.2f} to {span[1] / 1e6:.2f}"
