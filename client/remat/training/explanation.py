"""What `remat.explain` returns: text for a terminal, and in a notebook a picture with it."""

from __future__ import annotations

import html
from typing import Any

from remat_ir import InvalidData, draw_memory, figure_of

from ..planning.summary import headline, memory_curve, memory_svg, plain_curve
from .planned import Planned


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
        """Memory over time with and without the plan, as a `matplotlib` figure, one panel a plan: see `Answer.plot`.

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
