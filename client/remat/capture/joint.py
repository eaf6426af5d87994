"""The joint graph of a graph of Dynamo's, traced outside of Dynamo: of blocks that repeat a few are, at given sizes.

Of the traced blocks the second and the third have blocks that are alike on both sides. Where their parts of the joint
graph are the same, node by node and by what each node reads of its own block, of the neighbours, and of the rest, so
are those of the blocks between the third and the last, which are copied from the third.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _compat
from ..errors import CaptureError
from .dataflow import changed, results_of, tensors
from .refused import advice, first_line, place
from .repeats import KEPT, Run, metadata, nodes_in, runs, shortened, words
from .sizes import compute_sizes

log = logging.getLogger("remat")


def compiled_joint(graph: fx.GraphModule, inputs: Sequence[Any], mode: Any = None) -> Any:
    """The descriptor of both passes of a graph that Dynamo gives to its backend, at the sizes of a call.

    Args:
        graph: as `sized_by_inputs` makes it: without that no blocks of symbolic sizes are alike.
        inputs: of the call, in the order of the graph's placeholders.
        mode: of inputs that are fake and have symbols for sizes.

    Raises:
        CaptureError: torch cannot trace it; the message says why and what to do.
    """
    try:
        found = runs(graph.graph)
        if found:
            return _short(graph, found, inputs, mode)
    except Exception as error:  # noqa: BLE001 – the trace of the whole says what is wrong with the graph
        log.info("all blocks are traced one by one, which takes longer and changes no plan: %s", first_line(error))
    try:
        return _exported(graph, inputs, mode)
    except Exception as error:
        raise CaptureError(
            f"torch cannot trace both passes of it: {advice(graph, error)}{first_line(error)}{place(str(error))}"
        ) from error


def _exported(graph: fx.GraphModule, inputs: Sequence[Any], mode: Any) -> Any:
    """Traced as it is; what torch cannot trace so, once more with symbols for sizes that depend on data."""
    try:
        return _with_sizes(_compat.export_joint(graph, inputs, mode))
    except (AttributeError, AssertionError) as error:
        if mode is not None:
            raise
        log.info("traced again with symbols for sizes that depend on data: %s", first_line(error))
        symbols = _compat.Symbols({})
        return _compat.export_joint(graph, list(map(symbols.like, inputs)), symbols.mode)


def _with_sizes(descriptor: Any) -> Any:
    """With the sizes in its joint graph computed from the graph's own numbers."""
    compute_sizes(_compat.joint_graph(descriptor).graph, "val")
    return descriptor


def _short(whole: fx.GraphModule, found: Sequence[Run], inputs: Sequence[Any], mode: Any) -> Any:
    """The same, of a few blocks alone, with the others added."""
    short = _compat.with_graph(whole, shortened(whole.graph, found))
    places = {placeholder: at for at, placeholder in enumerate(whole.graph.find_nodes(op="placeholder"))}
    descriptor = _with_sizes(_compat.export_joint(short, inputs, mode))
    expand(_compat.joint_graph(descriptor), found, places)
    counts = ", ".join(f"{len(run.blocks)} blocks of {len(run.blocks[0])} ops" for run in found)
    log.info("the model repeats %s: %d of each kind were traced, the others are copies", counts, KEPT)
    return descriptor


_OF_ONE = frozenset({"from_node", "source_fn_stack", "fwd_source_fn_stack"})
"""Notes of a node that name one of Dynamo's."""

_OUTER, _INNER, _BEFORE, _AFTER, _OWN = range(5)
"""Where a node of a block reads from: outside of all, its block, the one before, the one after, its own primals."""


class NotAlike(Exception):
    """The traced blocks' parts of the joint graph differ; the message says in what."""


class _Place(NamedTuple):
    """Where something is, as seen from the third block.

    Attributes:
        kind: one of the five.
        at: the position in its block, or among what is its own.
        node: the node that the third block reads itself.
    """

    kind: int
    at: int
    node: fx.Node


@dataclass(eq=False)
class _Traced:
    """The parts of a joint graph that belong to the second and the third block of a run.

    Attributes:
        like, middle: the nodes of the second and of the third block, the forward pass's first.
        forward: how many of them are the forward pass's.
        own: [blocks] the primals of each.
        order: the position of each node of the graph.
        owner: the node that each storage is from, and its place among the tensors that this has.
    """

    like: Sequence[fx.Node]
    middle: Sequence[fx.Node]
    forward: int
    own: Sequence[Sequence[fx.Node]]
    order: Mapping[fx.Node, int]
    owner: Mapping[int, tuple[fx.Node, int]]
    at_like: dict[fx.Node, int] = field(init=False)
    at: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.at_like = {node: at for at, node in enumerate(self.like)}
        self.at = {node: at for at, node in enumerate(self.middle)}
        first, second = self.own[1], self.own[KEPT - 2]
        self._own = {pair: at for at, pair in enumerate(zip(first, second, strict=True))}
        self._owned = {*first, *second}

    def place(self, other: fx.Node, mine: fx.Node, reader: int) -> _Place:
        """Where the third block's node number `reader` reads `mine`, as the second block's reads `other`.

        Raises:
            NotAlike: from elsewhere than the second block.
        """
        if mine in self.at:
            if self.at_like.get(other) != self.at[mine]:
                raise NotAlike(f"{mine} is not read as {other} is")
            return _Place(_INNER, self.at[mine], mine)
        if (other, mine) in self._own:
            return _Place(_OWN, self._own[other, mine], mine)
        if mine in self._owned or other in self._owned:
            raise NotAlike(f"{mine} belongs to a block")
        if mine in self.at_like and other not in self.at_like and other not in self.at:
            return _Place(_BEFORE, self.at_like[mine], mine)
        if other in self.at and mine not in self.at_like:
            return _Place(_AFTER, self.at[other], mine)
        first = self.like[0] if reader < self.forward else self.middle[self.forward]
        if mine is not other or self.order[mine] >= self.order[first]:
            raise NotAlike(f"{mine} and {other} have different places")
        return _Place(_OUTER, 0, mine)

    def places(self, at: int) -> tuple[list[_Place], list[tuple[_Place, int]]]:
        """Of a node of the third block, where it reads from, and where the storage of each tensor that it has is from.

        Raises:
            NotAlike: the second block's does something else.
        """
        other, mine = self.like[at], self.middle[at]
        if (other.op, other.target) != ("call_function", mine.target) or mine.op != other.op:
            raise NotAlike(f"{other} is not what {mine} is")
        if words((other.args, other.kwargs)) != words((mine.args, mine.kwargs)):
            raise NotAlike(f"{other} and {mine} have different arguments")
        if metadata(other.meta.get("val")) != metadata(mine.meta.get("val")):
            raise NotAlike(f"{other} and {mine} make different tensors")
        pairs = zip(nodes_in((other.args, other.kwargs)), nodes_in((mine.args, mine.kwargs)), strict=True)
        reads = [self.place(o, m, at) for o, m in pairs]
        held = []
        for o, m in zip(tensors(other.meta.get("val")), tensors(mine.meta.get("val")), strict=True):
            (its, leaf), (own, same) = (self.owner[_compat.storage_key(t)] for t in (o, m))
            if leaf != same or o.untyped_storage().nbytes() != m.untyped_storage().nbytes():
                raise NotAlike(f"{other} and {mine} lie in different storages")
            held.append((self.place(its, own, at), leaf))
        return reads, held


class _Expansion:
    """Blocks that are added to a joint graph between the third block of a run and its last.

    Args:
        traced: what was traced of the run.
        run: as it is in Dynamo's graph.
    """

    def __init__(self, joint: fx.GraphModule, traced: _Traced, run: Run) -> None:
        self._joint, self._traced, self._run = joint, traced, run
        self._last = len(run.blocks) - 2
        """The number of the last block that is copied."""
        self._of: dict[int, list[fx.Node]] = {KEPT - 3: list(traced.like), KEPT - 2: list(traced.middle)}
        self._notes = {k: _renamed(run, k) for k in range(KEPT - 1, self._last + 1)}

    def add(self) -> None:
        """Add them, and let the last block and the third read from them.

        Raises:
            NotAlike: what was traced differs from block to block; the graph is as it was.
        """
        traced, graph = self._traced, self._joint.graph
        places = [traced.places(at) for at in range(len(traced.middle))]
        late = self._read_late()
        results = self._results()
        forward, numbers = traced.forward, range(KEPT - 1, self._last + 1)
        for number in numbers:
            self._of[number] = []
        with graph.inserting_before(traced.middle[forward - 1].next):
            for number in numbers:
                for at in range(forward):
                    self._copy(number, at, *places[at])
        with graph.inserting_before(traced.middle[forward]):
            for number in reversed(numbers):
                for at in range(forward, len(traced.middle)):
                    self._copy(number, at, *places[at])
        for at, node in enumerate(traced.middle):
            if any(place.kind == _AFTER for place in (*places[at][0], *(place for place, _ in places[at][1]))):
                node.args, node.kwargs = self._arguments(KEPT - 2, node, places[at][0])
                node.meta["val"] = self._value(KEPT - 2, node, places[at][1])
        for node in late:
            self._follow(node)
        output = graph.output_node()
        values, described = results_of(graph), _compat.descriptors(graph)
        for position, (like, number, at, primal) in results.items():
            values[position] = self._of[number][at]
            described[position] = replace(described[like], grad_of=_compat.description(primal))
        output.args = (values,)
        _compat.set_descriptors(graph, described)

    def _read_late(self) -> list[fx.Node]:
        """What is computed between the third block's two parts, and reads from it or lies in its storages."""
        traced = self._traced
        order, found = traced.order, []
        end, again = order[traced.middle[traced.forward - 1]], order[traced.middle[traced.forward]]
        for nodes, number in ((traced.like, 1), (traced.middle, 2)):
            for user in {user: None for node in nodes for user in node.users if user.op != "output"}:
                between = end < order[user] < again
                known = user in traced.at or user in traced.at_like
                if not known and (between if number == 1 else not between):
                    raise NotAlike(f"{user} reads of a block that is not next to it")
        for node, position in order.items():
            if end < position < again:
                owners = {traced.owner[_compat.storage_key(t)][0] for t in tensors(node.meta.get("val"))}
                if not owners.isdisjoint(traced.at_like):
                    raise NotAlike(f"{node} lies in a storage of a block that is not next to it")
                if not traced.at.keys().isdisjoint({*node.all_input_nodes, *owners}):
                    found.append(node)
        return found

    def _results(self) -> dict[int, tuple[int, int, int, fx.Node]]:
        """By positions among the results: where the third block's is; the block, node and primal of this one."""
        traced, values = self._traced, results_of(self._joint.graph)
        described = _compat.descriptors(self._joint.graph)
        at_primal = {getattr(d, "grad_of", None): position for position, d in enumerate(described)}
        own = {n: [at_primal.get(_compat.description(p)) for p in found] for n, found in enumerate(traced.own) if n}
        free = set()
        found: dict[int, tuple[int, int, int, fx.Node]] = {}
        for index, (first, second) in enumerate(zip(own[KEPT - 3], own[KEPT - 2], strict=True)):
            others = range(KEPT - 1, self._last + 1)
            rest = {number: position for number in others if (position := own[number][index]) is not None}
            if first is None or second is None or len(rest) < len(others):
                if first is None and second is None and not rest:
                    continue
                raise NotAlike("gradients are not those of the same parameters in all blocks")
            free |= {first, second}
            if values[first] is None and values[second] is None:
                continue
            at = traced.at.get(values[second])
            if at is None or traced.at_like.get(values[first]) != at:
                raise NotAlike("gradients come from different places in two blocks")
            for number, position in rest.items():
                found[position] = second, number, at, traced.own[number][index]
        for position, value in enumerate(values):
            if position not in free and isinstance(value, fx.Node) and (value in traced.at or value in traced.at_like):
                raise NotAlike(f"{value} is a result of the step")
        return found

    def _copy(self, number: int, at: int, reads: Sequence[_Place], held: Sequence[tuple[_Place, int]]) -> None:
        like = self._traced.middle[at]
        args, kwargs = self._arguments(number, like, reads)
        made = self._joint.graph.create_node("call_function", like.target, args, kwargs)
        made.meta = {key: value for key, value in like.meta.items() if key not in _OF_ONE}
        for key, renamed in self._notes[number].items():
            if key in made.meta:
                made.meta[key] = renamed.get(_key(made.meta[key]), made.meta[key])
        self._of[number].append(made)
        made.meta["val"] = self._value(number, made, held)

    def _arguments(self, number: int, like: fx.Node, reads: Sequence[_Place]) -> tuple[Any, Any]:
        following = iter(reads)
        return fx.node.map_arg((like.args, like.kwargs), lambda _: self._node(number, next(following)))

    def _node(self, number: int, place: _Place) -> fx.Node:
        """What a block reads where the third reads a place."""
        if place.kind == _OUTER or (place.kind == _AFTER and number == self._last):
            return place.node
        if place.kind == _OWN:
            return self._traced.own[number][place.at]
        block = number + {_INNER: 0, _BEFORE: -1, _AFTER: 1}[place.kind]
        return self._of[block][place.at]

    def _value(self, number: int, node: fx.Node, held: Sequence[tuple[_Place, int]]) -> Any:
        """The tensors of a block's node, made like those of the third's, in its own block's storages."""
        following = iter(held)

        def made(tensor: torch.Tensor) -> torch.Tensor:
            place, leaf = next(following)
            if place.kind == _OUTER or (number == KEPT - 2 and place.kind != _AFTER):
                return tensor
            owner = self._node(number, place)
            storage = None if owner is node else list(tensors(owner.meta["val"]))[leaf]
            return _compat.fake_like(tensor, storage)

        return changed(node.meta.get("val"), made)

    def _follow(self, node: fx.Node) -> None:
        """Let a node that follows on the third block follow on the last that is copied."""
        at, owner, last = self._traced.at, self._traced.owner, self._of[self._last]
        for read in [n for n in node.all_input_nodes if n in at]:
            node.replace_input_with(read, last[at[read]])

        def made(tensor: torch.Tensor) -> torch.Tensor:
            holder, leaf = owner[_compat.storage_key(tensor)]
            if holder not in at:
                return tensor
            return _compat.fake_like(tensor, list(tensors(last[at[holder]].meta["val"]))[leaf])

        node.meta["val"] = changed(node.meta.get("val"), made)


def _key(note: object) -> object:
    return tuple(note.items()) if isinstance(note, dict) else note


def _renamed(run: Run, number: int) -> dict[str, dict[object, Any]]:
    """By the kinds of notes, those of a block in place of the third's."""
    found: dict[str, dict[object, Any]] = {}
    for key, source in (
        *((key, _compat.MODULE_STACKS[0]) for key in _compat.MODULE_STACKS),
        ("stack_trace", "stack_trace"),
    ):
        pairs = zip(run.blocks[KEPT - 2], run.blocks[number], strict=True)
        found[key] = {_key(like.meta.get(source)): its.meta.get(source) for like, its in pairs}
    return found


def expand(joint: fx.GraphModule, found: Sequence[Run], places: Mapping[fx.Node, int]) -> None:
    """Add to a joint graph the blocks that were not traced.

    Args:
        found: the runs of which the graph has the first blocks and the last.
        places: of the inputs, by Dynamo's placeholders.

    Raises:
        NotAlike: what was traced differs from block to block.
    """
    with _compat.only_real_tensors(), torch.no_grad():
        for run in found:
            _Expansion(joint, _traced(joint, run, places), run).add()
    joint.graph.lint()


def _traced(joint: fx.GraphModule, run: Run, places: Mapping[fx.Node, int]) -> _Traced:
    nodes = list(joint.graph.nodes)
    block = {node.name: number for number, nodes in enumerate(run.blocks) for node in nodes}
    by_sequence: dict[int | None, int | None] = {}
    first: dict[tuple[bool, int | None], int] = {}
    for position, node in enumerate(nodes):
        if node.op in ("placeholder", "output"):
            continue
        backward, sequence = _compat.is_backward(node), _compat.sequence_number(node)
        number = by_sequence.get(sequence) if backward else block.get(_compat.traced_from(node))
        if not backward:
            by_sequence.setdefault(sequence, number)
        first.setdefault((backward, number), position)
    begins = [(False, n) for n in (1, 2, len(run.blocks) - 1)] + [(True, n) for n in (2, 1, 0)]
    marks = [first[begin] for begin in begins if begin in first]
    if len(marks) < len(begins) or marks != sorted(marks):
        raise NotAlike("blocks are not one after the other in both passes")
    a, b, c, d, e, f = marks
    if b - a != c - b or e - d != f - e:
        raise NotAlike("two blocks have parts of different length")
    primals = {_compat.input_place(n): n for n in nodes if n.op == "placeholder" and not _compat.is_tangent(n)}
    own = [[primals[at] for p in given if (at := places.get(p, -1)) in primals] for given in run.own]
    if any(len(found) < len(given) for found, given in zip(own, run.own, strict=True)):
        raise NotAlike("a block reads tensors that are no inputs of the graph")
    owner: dict[int, tuple[fx.Node, int]] = {}
    for node in nodes:
        for leaf, tensor in enumerate(tensors(node.meta.get("val"))):
            owner.setdefault(_compat.storage_key(tensor), (node, leaf))
    order = {node: position for position, node in enumerate(nodes)}
    return _Traced((*nodes[a:b], *nodes[e:f]), (*nodes[b:c], *nodes[d:e]), b - a, own, order, owner)
