"""A chain of stages with a link to the host: Rotor's model of a sequential network, and its exact lift to a graph.

What a chain plan means: its steps run one by one, with one link that carries one transfer a direction at a time. Plans
of a chain and plans of its lift stand for each other: the same costs, and no more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from .document import Column, Document, Flag, Integer, Member, OfDocument
from .errors import InvalidData, InvalidPlan
from .graph import Graph, check_column
from .link import Link
from .plan import STEP_OF_VERB, Compute, Free, Plan, Step, plan_document
from .read import LARGEST_INTEGER, kind
from .replay import Moment
from .words import readable

FORMAT = "remat-chain/1"
PLAN_FORMAT = "remat-chain-plan/1"
MOST_STAGES = 100_000

_PER_STAGE = ("forward_ns", "backward_ns", "forward_workspace_bytes", "backward_workspace_bytes", "tape_bytes")
_PER_CUT = ("activation_bytes", "gradient_bytes")
_UNTAPED = "untaped_workspace_bytes"

CHAIN = Document(
    "ChainDocument",
    "chain",
    "A `remat-chain/1`: stages 1 … L, the loss stage last.",
    {
        "forward_ns": Member(Column(shortest=1, cap=MOST_STAGES + 1)),
        **{key: Member(Column(cap=MOST_STAGES + 1)) for key in (*_PER_STAGE[1:], *_PER_CUT)},
        _UNTAPED: Member(Column(cap=MOST_STAGES + 1), None, nullable=True, sparse=True),
        "link_bytes_per_s": Member(Integer(least=1), None, nullable=True, sparse=True),
        "host_bytes": Member(Integer(), None, nullable=True, sparse=True),
        "input_may_leave": Member(Flag(), False, sparse=True),
    },
    (FORMAT,),
)


@dataclass(frozen=True)
class Chain(OfDocument):
    """A training step as stages 1 … L, the loss stage last (RR-9302, Section 3.1; Table 1).

    Stage l reads a^(l−1) and makes a^l; its tape ā^l, which includes a^l, is what its backward step needs besides
    a^(l−1) and δ^l. Arrays are columnar: entry l−1 of a per-stage array is stage l, entry l of a per-cut array cut l.

    Attributes:
        forward_ns, backward_ns: [L] u_f and u_b, in ns.
        forward_workspace_bytes, backward_workspace_bytes: [L] o_f and o_b: bytes that live only while the step runs.
        tape_bytes: [L] ω_ā, never less than the stage's ω_a.
        activation_bytes: [L + 1] ω_a; entry 0 is the input a^0, which is never freed.
        gradient_bytes: [L + 1] ω_δ; entry L is the first gradient, which appears with the first backward step.
        link_bytes_per_s: bandwidth β to the host in each direction, or None without a link.
        host_bytes: what the host can hold, or None without a limit.
        input_may_leave: whether transfers may move a^0, too; else it is resident throughout, as where the caller of a
            training step holds it.
        untaped_workspace_bytes: [L] o_f of a run that keeps no tape (F_ck, F_∅), or None where all are as with one. At
            least o_f, and at most o_f + ω_ā − ω_a: a run may keep its tape to its end and drop it then.

    Raises:
        InvalidData: naming the array and the stage or cut that is wrong.
    """

    document = CHAIN

    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    forward_workspace_bytes: tuple[int, ...]
    backward_workspace_bytes: tuple[int, ...]
    tape_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    link_bytes_per_s: int | None = None
    host_bytes: int | None = None
    untaped_workspace_bytes: tuple[int, ...] | None = None
    input_may_leave: bool = False

    def __post_init__(self) -> None:
        stages = len(self.forward_ns)
        if not 1 <= stages <= MOST_STAGES:
            raise InvalidData(f"chain has {stages} stages, not 1 to {MOST_STAGES}", "/forward_ns")
        for key in (*_PER_STAGE, *_PER_CUT):
            self._check_column(key)
        for i, (tape, activation) in enumerate(zip(self.tape_bytes, self.activation_bytes[1:], strict=True)):
            if tape < activation:
                raise InvalidData(
                    f"stage {i + 1}: tape_bytes {tape} is less than its activation_bytes {activation}, "
                    "which the tape includes",
                    f"/tape_bytes/{i}",
                )
        self._check_untaped()
        if self.total_cost_ns > LARGEST_INTEGER:
            raise InvalidData("the sum of forward_ns and backward_ns overflows 2^53", "/forward_ns")
        if sum(sum(getattr(self, key)) for key in (*_PER_STAGE[3:], "untaped_workspaces", *_PER_CUT)) > LARGEST_INTEGER:
            raise InvalidData("the sum of all bytes overflows 2^53", "/tape_bytes")
        super().__post_init__()
        if self.host_bytes is not None and self.link_bytes_per_s is None:
            raise InvalidData("host_bytes needs link_bytes_per_s: no link, no host", "/host_bytes")
        if self.input_may_leave and self.link_bytes_per_s is None:
            raise InvalidData("input_may_leave needs link_bytes_per_s: no link, no transfers", "/input_may_leave")
        for key in (*_PER_STAGE, *_PER_CUT):  # what was read in columns, now that it is right
            object.__setattr__(self, key, tuple(getattr(self, key)))

    def _check_column(self, key: str) -> None:
        column, cuts = getattr(self, key), key in _PER_CUT
        if len(column) != self.stages + cuts:
            more = ", and one more for the input" if cuts else ""
            raise InvalidData(f"{key} has {len(column)} entries where there are {self.stages} stages{more}", f"/{key}")
        check_column(column, "cut" if cuts else "stage", key, key, 0 if cuts else 1)

    def _check_untaped(self) -> None:
        column = self.untaped_workspace_bytes
        if column is None:
            return
        self._check_column(_UNTAPED)
        for i, untaped in enumerate(column):
            least = self.forward_workspace_bytes[i]
            most = least + self.tape_bytes[i] - self.activation_bytes[i + 1]
            if not least <= untaped <= most:
                raise InvalidData(
                    f"stage {i + 1}: {_UNTAPED} {untaped} is not from {least}, its forward_workspace_bytes, to {most}, "
                    "those and what its tape has besides the activation",
                    f"/{_UNTAPED}/{i}",
                )
        # one chain has one form, and one digest
        same = tuple(column) == tuple(self.forward_workspace_bytes)
        object.__setattr__(self, _UNTAPED, None if same else tuple(column))

    @property
    def stages(self) -> int:
        """The number of stages L, the loss stage included."""
        return len(self.forward_ns)

    @cached_property
    def total_cost_ns(self) -> int:
        """The cost of each forward and backward step once, in ns."""
        return sum(self.forward_ns) + sum(self.backward_ns)

    @property
    def untaped_workspaces(self) -> tuple[int, ...]:
        """[L] the workspace in bytes of each forward step that keeps no tape."""
        found = self.untaped_workspace_bytes
        return self.forward_workspace_bytes if found is None else found

    @property
    def fixed_bytes(self) -> int:
        """The input a^0: resident throughout, but for what a chain whose `input_may_leave` moves."""
        return self.activation_bytes[0]

    @property
    def staying_bytes(self) -> int:
        """What of the input is resident throughout, whatever a plan does: all of it, or nothing where it may leave."""
        return 0 if self.input_may_leave else self.fixed_bytes

    @property
    def movable(self) -> range:
        """The cuts whose stored value transfers may move to the host, in the order of the stages."""
        return range(0 if self.input_may_leave else 1, self.stages)

    @property
    def link(self) -> Link | None:
        """The link as a graph has it: the same bandwidth each way, no latency."""
        both = self.link_bytes_per_s
        return None if both is None else Link(both, both, host_bytes=self.host_bytes)

    def to_graph(self) -> Graph:
        """The exact lift, without the link: any plan of the graph is one of the chain, and the other way round.

        Ops are F^1 … F^L, the `once` op that stands for the incoming gradient δ^L, then B^L … B^1, each computed once.
        Op F^l makes a^l and the optional rest^l, of ω_ā − ω_a bytes; a^0 is fixed. Where a run without a tape needs
        more workspace, that part of rest^l is a value of its own, which every run makes. So values are numbered
        a^1, rest^1, a^2, … or a^1, part^1, rest^1, a^2, … (`stage_values`), then δ^L … δ^0; δ^0 stays to the end.
        B^l reads δ^l, a^(l−1), and what F^l makes.
        """
        count, width = self.stages, len(self.stage_values(1))
        inputs = [*(self.stage_values(stage)[:1] for stage in range(count)), ()]
        sizes: list[int] = []
        for i, (taped, untaped) in enumerate(zip(self.forward_workspace_bytes, self.untaped_workspaces, strict=True)):
            rest = self.tape_bytes[i] - self.activation_bytes[i + 1]
            part = (untaped - taped,) if width == 3 else ()
            sizes += (self.activation_bytes[i + 1], *part, rest - sum(part))
        for stage in range(count, 0, -1):
            before = self.stage_values(stage - 1)[:1]
            inputs.append((*before, *self.stage_values(stage), (width + 1) * count - stage))
        return Graph(
            op_cost_ns=(*self.forward_ns, 0, *reversed(self.backward_ns)),
            op_workspace_bytes=(*self.forward_workspace_bytes, 0, *reversed(self.backward_workspace_bytes)),
            op_inputs=tuple(inputs),
            value_op=(*(v // width for v in range(width * count)), *range(count, 2 * count + 1)),
            value_bytes=(*sizes, *reversed(self.gradient_bytes)),
            optional=tuple(range(width - 1, width * count, width)),
            once=tuple(range(count, 2 * count + 1)),
            keep=((width + 1) * count,),
            backward_from=count,
            fixed_bytes=self.activation_bytes[0],
        )

    def stage_values(self, stage: int) -> tuple[int, ...]:
        """The values of `to_graph` that are the tape of a stage: a^l first, the optional one last; none of stage 0."""
        width = 2 if self.untaped_workspace_bytes is None else 3
        return tuple(range(max(0, width * (stage - 1)), width * stage))


class Verb(StrEnum):
    """What a step of a chain plan does with stage or cut l (RR-9302, Table 1; transfers and `free` are ours).

    F_ALL: compute a^l and its whole tape ā^l; the input stays.
    F_CK: compute a^l; the input a^(l−1) stays.
    F_NONE: compute a^l; the input a^(l−1) is freed.
    B: compute δ^(l−1) from δ^l, ā^l and a^(l−1); frees all of them, but not an a^(l−1) whose tape is there.
    FREE: free a^l, whose tape is not there.
    OFFLOAD: start the copy of what is stored at l (ā^l, or else a^l) to the host; it stays charged.
    WAIT: block until the running transfer of what is stored at l has ended.
    DROP: free the device copy of what is stored at l, whose offload has ended and been waited for.
    PREFETCH: start the copy back; charged from here on, usable after WAIT.
    """

    F_ALL = "F_all"
    F_CK = "F_ck"
    F_NONE = "F_none"
    B = "B"
    FREE = "free"
    OFFLOAD = "offload"
    WAIT = "wait"
    DROP = "drop"
    PREFETCH = "prefetch"


TRANSFERS = frozenset((Verb.OFFLOAD, Verb.WAIT, Verb.DROP, Verb.PREFETCH))
"""The steps that need a link to the host."""


class ChainStep(NamedTuple):
    """One step on stage or cut `stage`, counted from 1; a transfer of the input is on cut 0."""

    verb: Verb
    stage: int


@dataclass(frozen=True)
class ChainPlan:
    """The steps of one training step of a chain, in order (`remat-chain-plan/1`)."""

    steps: tuple[ChainStep, ...]

    def to_json(self) -> dict[str, Any]:
        """The `remat-chain-plan/1` object."""
        return {"format": PLAN_FORMAT, "steps": [[step.verb.value, step.stage] for step in self.steps]}

    @classmethod
    def from_json(cls, data: object) -> ChainPlan:
        """Read a `remat-chain-plan/1` object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names the step.
        """
        rows = plan_document(PLAN_FORMAT).read(data)["steps"]
        return cls(tuple(_read_step(row, i) for i, row in enumerate(rows)))


def _read_step(row: object, i: int) -> ChainStep:
    here = f"/steps/{i}"
    if not isinstance(row, (list, tuple)) or len(row) != 2:
        raise InvalidData(f"step {i} must be [verb, stage]", here)
    verb, stage = row
    if not isinstance(verb, str) or verb not in Verb._value2member_map_:
        what = repr(verb) if isinstance(verb, str) else kind(verb)
        raise InvalidData(f"step {i}: unknown verb {what}", here + "/0")
    least = 0 if verb in TRANSFERS else 1  # an input that may leave is moved as what is stored at cut 0
    if type(stage) is not int or stage < least:
        found = stage if type(stage) is int else kind(stage)
        raise InvalidData(f"step {i}: the stage must be an integer from {least}, not {found}", here + "/1")
    return ChainStep(Verb(verb), stage)


def plain_chain_plan(chain: Chain) -> ChainPlan:
    """Every forward step once with its tape, then every backward step: training without rematerialization."""
    stages = range(1, chain.stages + 1)
    forward = tuple(ChainStep(Verb.F_ALL, stage) for stage in stages)
    return ChainPlan(forward + tuple(ChainStep(Verb.B, stage) for stage in reversed(stages)))


_FORWARD = (Verb.F_ALL, Verb.F_CK, Verb.F_NONE)


def replay_chain(chain: Chain, plan: ChainPlan) -> Iterator[Moment]:
    """Run a chain plan step by step, without a budget; the cost is the makespan so far, idle time included.

    Memory while a step runs: what is resident, a^0 first, in transfer in either direction included + what the step
    makes + its workspace. δ^L appears with B^L. A transfer is queued behind the one that runs in its direction, is
    charged on the device from its step on, and takes what `chain.link` takes for its bytes. `Moment.op` is the op of
    `Chain.to_graph`.

    Raises:
        InvalidPlan: the first rule that is broken, with its step.
    """
    state = _State(chain)
    for i, step in enumerate(plan.steps):
        verb, stage = step
        moves = verb in TRANSFERS and chain.input_may_leave
        if not (0 if moves else 1) <= stage <= chain.stages:
            raise InvalidPlan(f"there is no stage {stage}", i)
        if verb in _FORWARD:
            during, op = state.forward(verb, stage, i), stage - 1
        elif verb is Verb.B:
            during, op = state.backward(stage, i), 2 * chain.stages + 1 - stage
        else:
            during, op = state.other(verb, stage, i), None
        yield Moment(i, op, during, state.memory, state.now_ns, state.host_bytes, state.spans.pop(i, None))
    if state.next_backward:
        raise InvalidPlan(f"B {state.next_backward} is never computed")
    if state.moving:
        raise InvalidPlan(f"the transfer of {min(state.moving)} is never waited for")


class _State:
    """What is resident where, and when the link is free again."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.link = chain, chain.link
        self.memory = chain.activation_bytes[0]
        self.now_ns = 0
        self.reached = 0  # forward stages 1 … reached have been computed
        self.next_backward = chain.stages
        self.stored: dict[int, bool] = {0: False}  # cut -> with its tape? what is usable on the device
        self.on_host: dict[int, bool] = {}  # cut -> with its tape?, for copies that have arrived there
        self.leaving: set[int] = set()  # offloaded and waited for, not dropped yet
        self.moving: dict[int, tuple[Verb, int]] = {}  # cut -> its running transfer, and when it ends
        self.free_ns = {Verb.OFFLOAD: 0, Verb.PREFETCH: 0}  # when each direction is free again
        self.host_bytes = 0
        self.spans: dict[int, tuple[int, int]] = {}  # step -> when the transfer that it starts begins and ends

    def size(self, cut: int, tape: bool) -> int:
        """The bytes of what is stored at a cut."""
        return self.chain.tape_bytes[cut - 1] if tape else self.chain.activation_bytes[cut]

    def forward(self, verb: Verb, stage: int, i: int) -> int:
        """F^stage; returns the memory while it runs."""
        if stage > self.reached + 1:
            raise InvalidPlan(f"F {stage} is first computed before F {self.reached + 1}", i)
        if stage - 1 not in self.stored:
            raise InvalidPlan(f"F {stage} reads a {stage - 1}, which is not resident", i)
        if stage in self.stored or stage in self.moving or stage in self.on_host:
            raise InvalidPlan(f"F {stage} makes a {stage} while it is stored", i)
        tape = verb is Verb.F_ALL
        workspaces = self.chain.forward_workspace_bytes if tape else self.chain.untaped_workspaces
        during = self.memory + self.size(stage, tape) + workspaces[stage - 1]
        self.memory += self.size(stage, tape)
        self.stored[stage] = tape
        self.reached = max(self.reached, stage)
        self.now_ns += self.chain.forward_ns[stage - 1]
        if verb is Verb.F_NONE:
            self.release(stage - 1, f"F_none {stage}", i)
        return during

    def backward(self, stage: int, i: int) -> int:
        """B^stage; returns the memory while it runs."""
        chain = self.chain
        if stage != self.next_backward:
            raise InvalidPlan(f"B {stage} is computed where B {self.next_backward or 'nothing'} is next", i)
        if self.reached < chain.stages:
            raise InvalidPlan(f"B {stage} is computed before F {self.reached + 1}", i)
        if not self.stored.get(stage, False):
            raise InvalidPlan(f"B {stage} reads the tape of stage {stage}, which is not resident", i)
        if stage - 1 not in self.stored:
            raise InvalidPlan(f"B {stage} reads a {stage - 1}, which is not resident", i)
        if stage in self.moving:
            raise InvalidPlan(f"B {stage} frees a {stage} while it is transferred", i)
        if stage == chain.stages:
            self.memory += chain.gradient_bytes[stage]
        made = chain.gradient_bytes[stage - 1]
        during = self.memory + made + chain.backward_workspace_bytes[stage - 1]
        self.memory += made - chain.gradient_bytes[stage]
        self.discard(stage)
        if stage > 1 and not self.stored[stage - 1]:
            self.release(stage - 1, f"B {stage}", i)
        self.next_backward -= 1
        self.now_ns += chain.backward_ns[stage - 1]
        return during

    def release(self, cut: int, who: str, i: int) -> None:
        """Free a^cut on the device."""
        if cut == 0:
            raise InvalidPlan(f"{who} frees the input, which stays", i)
        if self.stored[cut]:
            raise InvalidPlan(f"{who} frees a {cut}, whose tape is resident", i)
        if cut in self.moving:
            raise InvalidPlan(f"{who} frees a {cut} while it is transferred", i)
        self.discard(cut)

    def discard(self, cut: int) -> None:
        """Let go of what is stored at `cut`, and of a copy on the host that was never needed."""
        size = self.size(cut, self.stored.pop(cut))
        self.memory -= size
        if cut in self.leaving:
            self.leaving.remove(cut)
            self.host_bytes -= size

    def other(self, verb: Verb, cut: int, i: int) -> int:
        """`free` and the transfers; returns the memory while the step runs."""
        before = self.memory
        if verb is Verb.FREE:
            if cut not in self.stored:
                raise InvalidPlan(f"a {cut} is freed but not resident", i)
            self.release(cut, "free", i)
            return before
        if self.link is None:
            raise InvalidPlan(f"{verb.value} needs a link to the host, which this chain has not", i)
        if verb is Verb.OFFLOAD:
            if cut not in self.stored or cut in self.moving or cut in self.leaving or cut in self.on_host:
                raise InvalidPlan(f"offload of {cut}, which is not resident or already has a copy on the host", i)
            size = self.size(cut, self.stored[cut])
            self.host_bytes += size
            if self.chain.host_bytes is not None and self.host_bytes > self.chain.host_bytes:
                over = f"over its limit of {readable(self.chain.host_bytes)}"
                raise InvalidPlan(f"the host would hold {readable(self.host_bytes)}, {over}", i)
            self.start(verb, cut, self.link.to_host_ns(size), i)
        elif verb is Verb.WAIT:
            if cut not in self.moving:
                raise InvalidPlan(f"wait for {cut}, which is not being transferred", i)
            direction, end = self.moving.pop(cut)
            self.now_ns = max(self.now_ns, end)
            if direction is Verb.OFFLOAD:
                self.leaving.add(cut)
            else:
                self.stored[cut] = self.on_host.pop(cut)
                self.host_bytes -= self.size(cut, self.stored[cut])
        elif verb is Verb.DROP:
            if cut not in self.leaving:
                raise InvalidPlan(f"drop of {cut}, whose offload has not ended and been waited for", i)
            self.leaving.remove(cut)
            self.on_host[cut] = self.stored.pop(cut)
            self.memory -= self.size(cut, self.on_host[cut])
        else:
            if cut not in self.on_host or cut in self.moving:
                raise InvalidPlan(f"prefetch of {cut}, which is not on the host or already under way", i)
            size = self.size(cut, self.on_host[cut])
            self.memory += size
            self.start(verb, cut, self.link.to_device_ns(size), i)
        return max(before, self.memory)

    def start(self, direction: Verb, cut: int, takes_ns: int, i: int) -> None:
        """Queue a transfer behind the one that runs in its direction."""
        begin = max(self.now_ns, self.free_ns[direction])
        end = begin + takes_ns
        self.free_ns[direction] = end
        self.moving[cut] = (direction, end)
        self.spans[i] = begin, end


def lifted_plan(chain: Chain, plan: ChainPlan) -> Plan:
    """The plan of `chain.to_graph()` that does what a chain plan does, at the same cost and peak.

    With transfers it is one of `chain.to_graph().with_link(chain.link)`. A tape moves there as its values, one right
    after the other, so its copy may take some ns more where the bandwidth doesn't divide its bytes. Moves of the input,
    which is fixed there, are left out.
    """
    count = chain.stages
    steps: list[Step] = []
    taped: set[int] = set()
    for verb, stage in plan.steps:
        tape, before = chain.stage_values(stage), chain.stage_values(stage - 1)[:1]
        a = tape[:1]
        found: tuple[Step, ...]
        if verb is Verb.F_ALL:
            taped.add(stage)
            found = (Compute(stage - 1, tape),)
        elif verb is Verb.F_CK:
            found = (Compute(stage - 1, a),)
        elif verb is Verb.F_NONE:
            found = (Compute(stage - 1, a), *map(Free, before))
        elif verb is Verb.B:
            taped.discard(stage)
            first = (Compute(count),) if stage == count else ()
            gradient = (len(tape) + 1) * count - stage
            dying = (gradient, *tape, *(before if stage - 1 not in taped else ()))
            found = (*first, Compute(2 * count + 1 - stage), *map(Free, dying))
        else:
            found = tuple(STEP_OF_VERB[verb](value) for value in (tape if stage in taped else a))
        steps.extend(found)
    return Plan(tuple(steps))


def lowered_plan(chain: Chain, computes: Iterable[int]) -> ChainPlan:
    """The chain plan that computes the ops of `chain.to_graph()` in the order of a valid plan of that graph.

    It costs no more and its peak is no higher than that of any valid plan with these computes: a tape is worth keeping
    only from the last F^l before B^l on, since nothing but B^l reads it and any later F^l would make it anew; an
    activation is freed after its last use; a forward step that nothing reads is left out.
    """
    count = chain.stages
    order = [op for op in computes if op != count]
    stages = [op + 1 if op < count else 2 * count + 1 - op for op in order]
    readers = _readers(order, stages, count)
    steps: list[ChainStep] = []
    made: dict[int, int] = {0: -1}  # cut -> the position that made what is stored there
    for position, (op, stage) in enumerate(zip(order, stages, strict=True)):
        if op > count:
            steps.append(ChainStep(Verb.B, stage))
            continue
        if not readers[position]:
            continue
        taped = any(order[reader] == 2 * count + 1 - stage for reader in readers[position])
        source = made[stage - 1]
        done = stage > 1 and max(readers[source]) == position
        if taped:
            steps.append(ChainStep(Verb.F_ALL, stage))
            steps.extend([ChainStep(Verb.FREE, stage - 1)] if done else ())
        else:
            steps.append(ChainStep(Verb.F_NONE if done else Verb.F_CK, stage))
        made[stage] = position
    return ChainPlan(tuple(steps))


def _readers(order: list[int], stages: list[int], count: int) -> list[list[int]]:
    """[positions] where each forward instance is read by a step that is itself read, found from the end."""
    readers: list[list[int]] = [[] for _ in order]
    made: dict[int, int] = {}
    sources: list[tuple[int, ...]] = []
    for position, (op, stage) in enumerate(zip(order, stages, strict=True)):
        before = (made[stage - 1],) if stage > 1 else ()
        sources.append(before if op < count else (*before, made[stage]))
        if op < count:
            made[stage] = position
    for position in reversed(range(len(order))):
        if order[position] > count or readers[position]:
            for source in sources[position]:
                readers[source].append(position)
    return readers
