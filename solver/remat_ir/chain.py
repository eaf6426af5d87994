"""A chain of stages with a link to the host: Rotor's model of a sequential network, and its exact lift to a graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .document import Column, Document, Flag, Integer, Member
from .errors import InvalidData
from .graph import Graph
from .link import Link
from .read import LARGEST_INTEGER, integer

FORMAT = "remat-chain/1"
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
class Chain:
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
        for keys, length, more in ((_PER_STAGE, stages, ""), (_PER_CUT, stages + 1, ", and one more for the input")):
            for key in keys:
                _check_column(key, getattr(self, key), length, more, first=1 if length == stages else 0)
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
        if self.link_bytes_per_s is not None:
            integer(self.link_bytes_per_s, "link_bytes_per_s", "/link_bytes_per_s", least=1)
        if self.host_bytes is not None:
            integer(self.host_bytes, "host_bytes", "/host_bytes")
            if self.link_bytes_per_s is None:
                raise InvalidData("host_bytes needs link_bytes_per_s: no link, no host", "/host_bytes")
        if self.input_may_leave and self.link_bytes_per_s is None:
            raise InvalidData("input_may_leave needs link_bytes_per_s: no link, no transfers", "/input_may_leave")
        for key in (*_PER_STAGE, *_PER_CUT):  # what was read in columns, now that it is right
            if not isinstance(getattr(self, key), tuple):
                object.__setattr__(self, key, tuple(getattr(self, key)))

    def _check_untaped(self) -> None:
        column = self.untaped_workspace_bytes
        if column is None:
            return
        _check_column(_UNTAPED, column, self.stages, "", first=1)
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
        inputs: list[tuple[int, ...]] = [(), *(self.stage_values(stage)[:1] for stage in range(1, count)), ()]
        sizes: list[int] = []
        for i, (taped, untaped) in enumerate(zip(self.forward_workspace_bytes, self.untaped_workspaces, strict=True)):
            rest = self.tape_bytes[i] - self.activation_bytes[i + 1]
            part = (untaped - taped,) if width == 3 else ()
            sizes += (self.activation_bytes[i + 1], *part, rest - sum(part))
        for stage in range(count, 0, -1):
            before = () if stage == 1 else self.stage_values(stage - 1)[:1]
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
        """The values of `to_graph` that are the tape of a stage: a^l first, the optional one last."""
        width = 2 if self.untaped_workspace_bytes is None else 3
        return tuple(range(width * (stage - 1), width * stage))

    def to_json(self) -> dict[str, Any]:
        """The `remat-chain/1` object."""
        return CHAIN.write(self)

    @classmethod
    def from_json(cls, data: object) -> Chain:
        """Read a `remat-chain/1` object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names key and index.
        """
        return cls(**CHAIN.read(data))


def _check_column(key: str, column: tuple[int, ...], length: int, more: str, first: int) -> None:
    if len(column) != length:
        stages = length - 1 + first
        raise InvalidData(f"{key} has {len(column)} entries where there are {stages} stages{more}", f"/{key}")
    thing = "stage" if first else "cut"
    for i, number in enumerate(column):
        if type(number) is not int or not 0 <= number <= LARGEST_INTEGER:
            integer(number, f"{thing} {i + first}: {key}", f"/{key}/{i}")
