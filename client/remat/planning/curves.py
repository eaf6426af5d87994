"""Memory over the steps of a plan: as numbers, and as a picture for a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from remat_ir import AnyPlan, Subject, plain_plan_of, replay_any

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
