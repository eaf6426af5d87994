"""A plan file: planned steps and their answers, to be run by another process without asking anybody.

It is JSON: `format` is `remat-plans/1`, `steps` a list of objects with the `graph` (`remat-graph/1`, with names), the
`answer` to it, and `priced`, in words, where its costs are from. Where a training step has several calls or graphs,
`budget_bytes` is what all of them may take together. The file stays where it is written: it has names.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Offload, Plan, Problem, host_peak, readable, verify
from remat_ir.document import Integer
from remat_ir.read import array, members, parse

from ..errors import PlanMismatch
from .check import checked
from .folder import write_named
from .options import DEFAULT, SolveOptions
from .planner import Planner
from .sources import OnProgress

FORMAT = "remat-plans/1"

log = logging.getLogger("remat")


class PlannedStep(NamedTuple):
    """A step that was planned.

    Attributes:
        graph: with names, which a refusal uses.
        answer: has a plan of it.
        priced: where the costs are from, in words.
    """

    graph: Graph
    answer: Answer
    priced: str


class PlanFile:
    """The planned steps of a file.

    Attributes:
        shared_bytes: the budget of a training step of several calls or graphs; fixed bytes are in it.

    Example:
        >>> import tempfile
        >>> from remat_ir import Problem, graph_of, plain_plan
        >>> graph = graph_of([1, 2], [4, 5], [[], [0]])
        >>> answer = Answer.of_plan(Problem(graph, 9), plain_plan(graph), method="greedy")
        >>> path = Path(tempfile.mkdtemp()) / "plan.json"
        >>> write_plan_file(path, [PlannedStep(graph, answer, "made up")])
        >>> PlanFile(path).steps[0].answer.cost_ns
        3

    Raises:
        InvalidData: it cannot be read, or one of its plans is not one of its graph.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidData(f"plan must be the path of a plan file, not {path!r}")
        self.path = Path(path)
        try:
            text = self.path.read_bytes()
        except OSError as error:
            raise InvalidData(f"the plan file {path} cannot be read: {error.strerror or error}") from None
        try:
            self.steps, shared = read_steps(parse(text))
            self.shared_bytes = max(step.answer.budget_bytes for step in self.steps) if shared is None else shared
        except InvalidData as error:
            where = f" (at {error.pointer})" if error.pointer else ""
            raise InvalidData(f"the plan file {path}: {error}{where}", error.pointer) from None

    def budget_bytes(self, graph: Graph) -> int:
        """The budget for which the step with this graph was planned.

        Raises:
            PlanMismatch: none of the steps has this graph.
        """
        found = self.find(graph)
        if found is None:
            raise self.mismatch(graph)
        return found.answer.budget_bytes

    def find(self, graph: Graph) -> PlannedStep | None:
        """The step whose ops and values are those of a graph; the one of the same bytes first."""
        alike = self.alike(graph)
        same = [step for step in alike if step.graph.value_bytes == graph.value_bytes]
        return next(iter((*same, *alike)), None)

    def alike(self, graph: Graph) -> list[PlannedStep]:
        """The steps whose ops and values are those of a graph."""
        return [step for step in self.steps if difference(graph, step.graph) is None]

    def mismatch(self, graph: Graph) -> PlanMismatch:
        """Why none of the steps is the one of a graph; of several, the nearest in its number of ops is named."""
        nearest = min(self.steps, key=lambda step: abs(step.graph.ops - graph.ops))
        return PlanMismatch(
            f"the plan file {self.path} is for another step than the one captured here: "
            f"{difference(graph, nearest.graph)}; plan this one again, or undo what changed"
        )


def read_steps(data: object) -> tuple[tuple[PlannedStep, ...], int | None]:
    """The steps of a `remat-plans/1` object, each plan verified on its graph, and the budget that they share, if any.

    Raises:
        InvalidData: malformed; the message names the place.
    """
    found = members(data, "a plan file", ("steps",), ("budget_bytes",), FORMAT)
    rows = array(found["steps"], "steps", "/steps")
    if not rows:
        raise InvalidData("a plan file has at least one step", "/steps")
    steps = []
    for number, row in enumerate(rows):
        at = f"/steps/{number}"
        part = members(row, "a step", ("graph", "answer"), ("priced",))
        graph, answer = Graph.from_json(part["graph"]), Answer.from_json(part["answer"])
        if not isinstance(answer.plan, Plan):
            raise InvalidData("the answer has no plan of a graph", f"{at}/answer/plan")
        try:
            problem = Problem(graph, answer.budget_bytes)
            verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        except InvalidPlan as error:
            raise InvalidData(f"the plan is wrong: {error}", f"{at}/answer/plan") from None
        steps.append(PlannedStep(graph, answer, str(part.get("priced", ""))))
    shared = found.get("budget_bytes")
    return tuple(steps), None if shared is None else Integer().read(shared, "budget_bytes", "/budget_bytes")


def write_plan_file(
    path: str | os.PathLike[str], steps: Sequence[PlannedStep], shared_bytes: int | None = None
) -> None:
    """Write planned steps so that no reader sees a part of them.

    Args:
        shared_bytes: the budget that they share, fixed bytes included; None: each has its own.

    Raises:
        InvalidData: there is no step, or the file cannot be written.
    """
    if not steps:
        raise InvalidData("there is no plan to write: no step has been captured and planned yet")
    rows = [
        {"graph": step.graph.to_json(names=True), "answer": step.answer.to_json(), "priced": step.priced}
        for step in steps
    ]
    shared = {} if shared_bytes is None else {"budget_bytes": shared_bytes}
    text = json.dumps({"format": FORMAT, **shared, "steps": rows}, separators=(",", ":"), allow_nan=False) + "\n"
    folder = Path(path).parent
    if not folder.is_dir():
        raise InvalidData(f"{path} cannot be written: there is no folder {folder}")
    try:
        write_named(Path(path), text.encode())
    except OSError as error:
        raise InvalidData(f"{path} cannot be written: {error.strerror or error}") from None


def difference(here: Graph, other: Graph) -> str | None:
    """Where two steps differ in what they run and read, in words; None: a plan of one is a plan of the other.

    Bytes, costs and the paths of modules may differ.
    """
    for op in range(min(here.ops, other.ops)):
        if _operators(here, op) != _operators(other, op):
            return f"{here.op_label(op)} is {other.op_label(op)} in the file"
        if here.op_inputs[op] != other.op_inputs[op]:
            return f"{here.op_label(op)} reads other values than in the file"
        if here.op_values[op] != other.op_values[op]:
            return f"{here.op_label(op)} makes {_count(here, op)} and {_count(other, op)} in the file"
    if here.ops != other.ops:
        longer, where = (here, "here") if here.ops > other.ops else (other, "in the file")
        first = longer.op_label(min(here.ops, other.ops))
        return f"it has {here.ops} ops and the file's {other.ops}; the first that is only {where} is {first}"
    sets = {"optional": (here.optional, other.optional), "once": (here.once, other.once)}
    sets |= {"keep": (here.keep, other.keep), "consumes": (here.consumes, other.consumes)}
    for name, (mine, theirs) in sets.items():
        if set(mine) != set(theirs):
            number = min(set(mine) ^ set(theirs))
            op = number if name == "once" else here.value_op[number]
            what = "" if name == "once" else "a value of "
            return f"{what}{here.op_label(op)} is not {name!r} both here and in the file"
    return None if here.backward_from == other.backward_from else "the backward pass begins at another op"


def _operators(graph: Graph, op: int) -> str:
    return "" if graph.op_names is None else graph.op_names[op].rpartition(":")[2]


def _count(graph: Graph, op: int) -> str:
    made = len(graph.op_values[op])
    return f"{made} value{'' if made == 1 else 's'}"


class PinnedPlanner:
    """Answers with the plans of a file, verified and priced on the graph that is asked about.

    The first step must be one of the file's. A later one that is not, such as an evaluation with other losses, is left
    to `otherwise`, with a warning.
    """

    def __init__(self, file: PlanFile, otherwise: Planner | None) -> None:
        self.file, self.otherwise = file, otherwise
        self._met = False

    def planner_of(self, graph: Graph) -> Planner:
        """Who answers for a graph: the file, or with a warning `otherwise`.

        Raises:
            PlanMismatch: the file has no plan of it, and must.
        """
        if self.file.find(graph) is not None:
            return self
        refused = self.file.mismatch(graph)
        if not self._met or self.otherwise is None:
            raise refused
        log.warning("%s; it is planned as if there were no file", refused)
        return self.otherwise

    def plans_of(self, graph: Graph) -> list[Plan]:
        """The file's plans of a graph, of which a step of several calls may take any; none where it is left to others.

        Raises:
            PlanMismatch: the file has no plan of it, and must.
        """
        if self.planner_of(graph) is not self:
            return []
        self._met = True
        found = [step.answer.plan for step in self.file.alike(graph) if isinstance(step.answer.plan, Plan)]
        for plan in found:
            self._check_link(graph, plan)
        return found

    def _check_link(self, graph: Graph, plan: Plan) -> None:
        if graph.link is None and any(isinstance(step, Offload) for step in plan.steps):
            raise PlanMismatch(
                f"the plan of {self.file.path} moves values to the host: give the link that it was made for as link="
            )

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """The file's plan as an answer to a problem.

        Raises:
            PlanMismatch: the file has no plan of this graph, or one that does not fit the budget here.
        """
        found = self.file.find(problem.graph)
        if found is None:
            return self.planner_of(problem.graph).plan(problem, options, on_progress=on_progress)
        plan = found.answer.plan
        assert isinstance(plan, Plan)
        self._met = True
        self._check_link(problem.graph, plan)
        if problem == Problem(found.graph, found.answer.budget_bytes):
            return checked(problem, found.answer)
        said = f"The plan of {self.file.path}, verified and priced here."
        try:
            return Answer.of_plan(problem, plan, method=found.answer.method, cache="file", message=said)
        except InvalidPlan:
            raise PlanMismatch(self._too_large(problem, found)) from None

    def _too_large(self, problem: Problem, found: PlannedStep) -> str:
        """Why a plan does not fit here: the device's memory, or else the host's limit."""
        graph, plan = problem.graph, found.answer.plan
        assert isinstance(plan, Plan)
        limit = None if graph.link is None else graph.link.host_bytes
        if graph.link is not None:
            graph = graph.with_link(replace(graph.link, host_bytes=None))
        peak = verify(Problem(graph, 2**53), plan).peak_bytes
        if limit is not None and peak <= problem.budget_bytes:
            return (
                f"the plan of {self.file.path} keeps {readable(host_peak(graph, plan))} on the host, and host_bytes is "
                f"{readable(limit)}; plan again for this limit, or give a larger one"
            )
        text = f"the plan of {self.file.path} needs {readable(peak)} here, and the budget is "
        text += f"{readable(problem.budget_bytes)}"
        if graph.fixed_bytes > found.graph.fixed_bytes:
            fixed, before = readable(graph.fixed_bytes), readable(found.graph.fixed_bytes)
            text += f": parameters, inputs, gradients and optimizer take {fixed} and took {before} when it was made"
        if sum(graph.op_workspace_bytes) > sum(found.graph.op_workspace_bytes):
            text += "; kernels take more memory of their own here than was known when it was made"
        return f"{text}; plan again for this budget, or give a larger one"
