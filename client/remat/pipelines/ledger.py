"""What a rank of a pipeline holds besides what its stages' plans count, from the schedule's actions and bytes alone.

The rules are those of `torch.distributed.pipelining`, at the same moments at which `optimize_pipeline` watches a step:
a stage receives into buffers of its own, one for each micro-batch, that stay; what one stage gives to the next on the
same rank takes the place of such a buffer; what is sent is held until the schedule waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from ..capture.operations import Operations
from .choice import Place
from .schedule import Held, Moment, Run, residency


class Passed(NamedTuple):
    """Bytes of a stage's tensors that come and go.

    Attributes:
        inputs: of one micro-batch.
        input_gradients: of those inputs that have one.
        outputs: that it returns, and that its plans count from the forward pass on.
        tangents: gradients of the outputs, which its plans count in the backward pass.
        late: those of them that the second half of a backward pass still reads.
        gradients: of its parameters.
    """

    inputs: int
    input_gradients: int
    outputs: int
    tangents: int
    late: int
    gradients: int


def passed(step: Operations, inputs: int, gradients: int, parameters: Collection[int]) -> Passed:
    """The bytes that a captured stage is given and gives.

    Args:
        parameters: the positions of its parameters among the tensors that it is given.
    """
    flow, turn = step.flow, step.ops[step.turn]
    made = {storage for op in step.ops for storage in op.makes}
    own = {flow.given[n] for n in parameters}

    def size(nodes: Sequence[object]) -> int:
        found = {s for node in nodes for s in flow.storages_of.get(node, ())}  # type: ignore[call-overload]
        return sum(step.sizes[s] for s in found & made)

    second = step.ops[step.halfway + 1 :] if step.halfway is not None else ()
    late = set(turn.makes) & {s for op in second for s in op.reads}
    return Passed(
        inputs,
        size([r for p, r in zip(flow.primals, flow.backward_results, strict=False) if p not in own]),
        size([r for r in flow.forward_results if r not in flow.mutated.values()]),
        sum(step.sizes[s] for s in turn.makes),
        sum(step.sizes[s] for s in late),
        gradients,
    )


def buffers_bytes(stages: Mapping[int, Passed], micros: int, last: int) -> int:
    """What a rank's stages receive into, and the batch that is given to them: there throughout."""
    return micros * sum(s.inputs + (s.outputs if stage < last else 0) for stage, s in stages.items())


def places_by_actions(runs: Sequence[Run], stages: Mapping[int, Passed], last: int, waits_at_end: bool) -> list[Place]:
    """The distinct moments of a rank's step, and what there is then besides its stages' plans and the fixed bytes.

    Args:
        runs: of the rank, without second halves where a stage's backward pass is whole.
        stages: of the rank, in the order of `runs`' numbers.
        last: the number of the pipeline's last stage, which computes the loss.
        waits_at_end: what is sent is held until then; else the last message of each kind is.
    """
    book = _Book(stages, {run.stage for run in runs if run.kind == "weight"}, last, waits_at_end)
    rest: dict[Moment, int] = {}
    for at, moment in enumerate(residency(runs, list(stages))):
        book.now(moment, rest)
        if moment.kind is not None:
            book.after(runs[at // 2])
    return [Place(*moment, left) for moment, left in rest.items()]


class _Book:
    def __init__(self, stages: Mapping[int, Passed], halved: Set[int], last: int, waits_at_end: bool) -> None:
        self.stages, self.halved, self.last, self.waits_at_end = stages, halved, last, waits_at_end
        self.numbers = list(stages)
        self.gradients: dict[int, int] = {}
        self.messages: dict[int, int] = {}

    def now(self, moment: Moment, rest: dict[Moment, int]) -> None:
        """Enter what there is at a moment."""
        found = sum(self.gradients.values()) + sum(self.messages.values()) - self._counted_twice(moment.held)
        if moment.kind in ("backward", "weight"):
            number = self.numbers[moment.stage]
            own = self.stages[number]
            if number < self.last:
                found -= own.tangents if moment.kind == "backward" else own.late
            if moment.kind == "weight" or self._stays(number):
                found -= own.outputs
        rest[moment] = max(found, rest.get(moment, found))

    def after(self, run: Run) -> None:
        """A pass has ended."""
        own = self.stages[run.stage]
        if run.kind == "backward":
            sent = own.input_gradients if run.stage and run.stage - 1 not in self.stages else 0
            sent += own.outputs if run.stage < self.last and not self._stays(run.stage) else 0
            self.messages[run.stage] = sent + (self.messages.get(run.stage, 0) if self.waits_at_end else 0)
        if run.kind == "weight" or (run.kind == "backward" and run.stage not in self.halved):
            self.gradients[run.stage] = own.gradients

    def _stays(self, number: int) -> bool:
        """Whether a stage's outputs lie in the buffers of the next stage, which is on this rank."""
        return number + 1 in self.stages

    def _counted_twice(self, held: Held) -> int:
        """What the plans of micro-batches that wait count, and buffers and messages do too."""
        found = 0
        for number, forward, between in zip(self.numbers, *held, strict=True):
            own = self.stages[number]
            found += forward * own.outputs if self._stays(number) else 0
            found += between * (own.outputs + (own.late if number < self.last else 0))
        return found
