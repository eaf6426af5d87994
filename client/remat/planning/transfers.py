"""What a plan moves over the link to the host, for people."""

from __future__ import annotations

from typing import NamedTuple

from remat_ir import Graph, Offload, Plan, Prefetch, Subject, host_peak, readable, replay


class Move(NamedTuple):
    """A copy of a value over the link: when it begins and ends, in ns from the start of the step."""

    value: int
    out: bool
    begin_ns: int
    end_ns: int


def moves(graph: Graph, plan: Plan) -> list[Move]:
    """The copies that a plan starts, in the order of its steps."""
    found = []
    for moment in replay(graph, plan):
        step = plan.steps[moment.step]
        if isinstance(step, Offload | Prefetch):
            assert moment.copy_ns is not None
            found.append(Move(step.value, isinstance(step, Offload), *moment.copy_ns))
    return found


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
    """A value's stay on the host: when it is copied out, and back; None where it is not."""

    value: int
    out_ns: tuple[int, int]
    back_ns: tuple[int, int] | None


def journeys(graph: Graph, plan: Plan) -> list[Journey]:
    """The stays on the host of a plan's values, in the order in which they begin."""
    found: list[Journey] = []
    latest: dict[int, int] = {}
    for move in moves(graph, plan):
        span = (move.begin_ns, move.end_ns)
        if move.out:
            latest[move.value] = len(found)
            found.append(Journey(move.value, span, None))
        else:
            found[latest[move.value]] = found[latest[move.value]]._replace(back_ns=span)
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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )


def _span(span: tuple[int, int]) -> str:
    return f"{span[0] / 1e6:.2f} to {span[1] / 1e6:.2f}"
