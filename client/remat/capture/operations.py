"""From a joint graph to the ops and values that are planned: the captured step in the language of remat_ir."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

import torch
from torch import fx

from remat_ir import Graph, InvalidData

from .. import _compat
from ..planning.profiles import Profile
from .dataflow import Dataflow, is_choice, is_random, is_unknown, results_of, stateless, tensors, value_bytes

T = TypeVar("T")

CPU_GENERATOR_BYTES = 5056
"""The state of torch's CPU generator. CUDA's lives on the host and costs the device nothing."""


class Kind(Enum):
    """What an op of the step does."""

    KERNELS = "kernels"
    RANDOM_STATE = "random_state"
    ORIGINAL = "original"
    TURN = "turn"
    ACCUMULATE = "accumulate"
    UPDATE = "update"
    BEFORE_UPDATE = "before_update"
    HALFWAY = "halfway"


@dataclass(frozen=True, eq=False)
class Op:
    """One op of the planned graph.

    Kinds:
        KERNELS: `nodes`, run in this order. Storages that nothing outside reads are workspace.
        RANDOM_STATE: a copy of the CPU generator's state just before `nodes[0]` draws from it.
        ORIGINAL: a copy of an input (`nodes[0]`) that the step overwrites, for ops that read it.
        TURN: the end of the forward pass: new buffers are copied back, the incoming tangents arrive.
        ACCUMULATE: a copy of a new gradient (`nodes[0]`), which autograd stores in its input's layout (`nodes[1]`).
        UPDATE: a gradient is used up by an update of its parameter (`nodes[0]`): see `updates`.
        BEFORE_UPDATE: parameters as they are before their updates, of no bytes.
        HALFWAY: the gradients of the inputs are given away, before those of the parameters are made: see `in_halves`.
    """

    kind: Kind
    nodes: tuple[fx.Node, ...]
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    consumes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Operations:
    """The step as ops over storages: those of the dataflow, then those that only the plan knows.

    Attributes:
        ops: in the order of their first computation.
        sizes: [storages] bytes.
        keep: storages that stay to the end of the step once made.
        states: random kernel → the storage of the generator's state before it.
        originals: overwritten placeholder → the storage of the copy that ops read.
        once: kernels that no plan may run again.
        copies: inputs whose gradient is copied into their layout → the bytes that this takes while it runs.
        updates: parameters that are updated inside the backward pass → the bytes that this takes while it runs.
        early, given: the positions of the backward results that are given away at HALFWAY, and what of `keep` they lie
            in.
    """

    flow: Dataflow
    ops: tuple[Op, ...]
    sizes: tuple[int, ...]
    keep: frozenset[int]
    states: Mapping[fx.Node, int]
    originals: Mapping[fx.Node, int]
    once: frozenset[fx.Node] = frozenset()
    copies: Mapping[fx.Node, int] = field(default_factory=dict)
    updates: Mapping[fx.Node, int] = field(default_factory=dict)
    early: tuple[int, ...] = ()
    given: frozenset[int] = frozenset()

    @cached_property
    def turn(self) -> int:
        """The index of the TURN op, where the backward pass begins."""
        return next(at for at, op in enumerate(self.ops) if op.kind is Kind.TURN)

    @cached_property
    def halfway(self) -> int | None:
        """The index of the HALFWAY op, if there is one."""
        return next((at for at, op in enumerate(self.ops) if op.kind is Kind.HALFWAY), None)

    def of(self, joint: fx.GraphModule, like: Mapping[fx.Node, fx.Node]) -> Operations:
        """The same operations of another joint graph, which has a node like each of this one's."""

        def each(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(like[node] for node in nodes)

        def by(found: Mapping[fx.Node, T]) -> dict[fx.Node, T]:
            return {like[node]: value for node, value in found.items()}

        flow, results = self.flow, results_of(joint.graph)
        first = len(flow.forward_results)
        flow = replace(
            flow,
            joint=joint,
            kernels=each(flow.kernels),
            makes=by(flow.makes),
            reads=by(flow.reads),
            owner=each(flow.owner),
            primals=each(flow.primals),
            tangents=each(flow.tangents),
            forward_results=tuple(results[:first]),
            backward_results=tuple(results[first:]),
            mutated={like[given]: like[new] for given, new in flow.mutated.items()},
            storages_of=by(flow.storages_of),
        )
        return replace(
            self,
            flow=flow,
            ops=tuple(replace(op, nodes=each(op.nodes)) for op in self.ops),
            states=by(self.states),
            originals=by(self.originals),
            once=frozenset(each(self.once)),
            copies=by(self.copies),
            updates=by(self.updates),
        )

    def takes(self, op: Op) -> int:
        """The bytes that an op that runs no kernels needs while it runs."""
        if op.kind is Kind.UPDATE:
            return self.updates[op.nodes[0]]
        return self.copies.get(op.nodes[-1], 0) if op.kind is Kind.ACCUMULATE else 0


def operations(
    flow: Dataflow,
    groups: Sequence[Sequence[fx.Node]] | None = None,
    replayed: bool = True,
    one_plan: bool = False,
    functional: Collection[str] = (),
) -> Operations:
    """The ops of a step, one for each group of kernels; by default each kernel is a group of its own.

    Groups are listed in the order in which they run, those of the forward pass first. Unless `replayed`, random
    kernels have no saved state to be run again from. Unless all ranks run `one_plan`, a collective runs once: one that
    a single rank ran again would pair with another one of the other ranks. An operator that is none of torch's runs
    once, unless it is one of `functional`: it may draw numbers, or count its calls. So does a choice among numbers: by
    a kernel that adds in another order each time, experts that are computed again would see other tokens.
    """
    groups = [(n,) for n in flow.kernels] if groups is None else groups
    sizes = list(flow.sizes)
    forward = frozenset(flow.kernels[: flow.forward_kernels])

    def extra(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    originals = {p: extra(sizes[flow.storages_of[p][0]]) for p in _read_and_overwritten(flow)}
    states = {n: extra(CPU_GENERATOR_BYTES) for n in flow.kernels if replayed and is_random(n) and on_cpu(n)}
    ops = [Op(Kind.ORIGINAL, (p,), (), (s,)) for p, s in originals.items()]
    tail: list[Op] = []
    for nodes in groups:
        target = ops if nodes[0] in forward else tail
        for node in nodes:
            if node in states:
                target.append(Op(Kind.RANDOM_STATE, (node,), (), (states[node],)))
        reads, makes = _ports(flow, nodes, originals, states)
        target.append(Op(Kind.KERNELS, tuple(nodes), reads, makes))
    new = sorted(s for s in flow.storages(flow.mutated.values()) if flow.owner[s].op == "call_function")
    ops.append(Op(Kind.TURN, (), tuple(new), tuple(s for t in flow.tangents for s in flow.storages_of[t])))
    ops += tail
    pairs = _copied_gradients(flow)
    ops += [Op(Kind.ACCUMULATE, pair, flow.storages_of[pair[0]], (extra(value_bytes(pair[0])),)) for pair in pairs]
    copies = {given: copying_bytes(result.meta["val"], given.meta["val"]) for result, given in pairs}
    ops, keep = _only_what_is_read(flow, ops)
    once = {n for n in flow.kernels if not one_plan and _compat.is_collective(n.target)}
    once |= {n for n in flow.kernels if is_choice(n)}
    once |= {n for n in flow.kernels if is_unknown(n) and custom_name(n) not in functional}
    return Operations(flow, tuple(ops), tuple(sizes), keep, states, originals, frozenset(once), copies)


def to_graph(step: Operations, measured: Mapping[fx.Node, Profile], fixed_bytes: int) -> tuple[Graph, tuple[int, ...]]:
    """The remat_ir graph of a step, and the storage that each of its values stands for.

    What a backend's threads hold for a moment longer than the step is counted with the fixed bytes.
    """
    made = [(index, storage) for index, op in enumerate(step.ops) for storage in op.makes]
    storages = tuple(storage for _, storage in made)
    number = {storage: value for value, storage in enumerate(storages)}
    measured = {n: _with_replay(step, n, measured[n]) for n in step.flow.kernels}
    costs = [sum(measured[n].cost_ns for n in op.nodes) if op.kind is Kind.KERNELS else 0 for op in step.ops]
    graph = Graph(
        op_cost_ns=tuple(costs),
        op_workspace_bytes=tuple(_workspace(step, op, measured) for op in step.ops),
        op_inputs=tuple(tuple(sorted(number[s] for s in op.reads)) for op in step.ops),
        value_op=tuple(index for index, _ in made),
        value_bytes=tuple(step.sizes[s] for s in storages),
        once=tuple(i for i, op in enumerate(step.ops) if op.kind is not Kind.KERNELS or _runs_once(step, i)),
        keep=tuple(sorted(number[s] for s in step.keep if s in number)),
        consumes=tuple(sorted(number[s] for op in step.ops for s in op.consumes)),
        backward_from=step.turn,
        fixed_bytes=fixed_bytes + held_by_threads(step),
        op_names=tuple(op_name(op) for op in step.ops),
        value_names=tuple(f"{step.flow.owner[s].name}" if s < len(step.flow.owner) else f"extra{s}" for s in storages),
    )
    return graph, storages


BACKEND_THREADS = 2
"""gloo runs collectives in so many threads. Each lets go of what it has used a moment after the collective has ended:
of 2,000 all-reduces between two ranks 170 still held their buffer when the wait for them had returned."""


def held_by_threads(step: Operations) -> int:
    """The bytes that threads of a backend may hold next to what a step holds; on a CPU alone, where gloo runs them."""
    used = sorted(
        (
            sum(step.sizes[s] for s in (*step.flow.makes[n], *(() if _in_place_of_a_copy(n) else step.flow.reads[n])))
            for n in step.flow.kernels
            if _compat.is_collective(n.target) and "wait_tensor" not in str(n.target) and on_cpu(n)
        ),
        reverse=True,
    )
    return sum(used[:BACKEND_THREADS])


def _in_place_of_a_copy(node: fx.Node) -> bool:
    """Whether a collective runs in place, on the copy that it makes of what it reads."""
    return any(word in str(node.target) for word in ("all_reduce", "broadcast"))


def returned_gradients(step: Operations) -> frozenset[int]:
    """The storages of all gradients that a step returns."""
    flow = step.flow
    storages = flow.storages(flow.backward_results)
    storages |= {s for op in step.ops if op.kind is Kind.ACCUMULATE for s in op.makes}
    return step.keep & storages


def check_functional(names: Collection[str]) -> None:
    """Refuse names of operators, as "namespace::name", that torch does not know.

    Raises:
        InvalidData: there is one; the message names it.
    """
    for name in names:
        namespace, _, rest = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), rest.partition(".")[0]):
            raise InvalidData(f"functional_ops names {name}, and torch knows no such operator: import what defines it")


def notes(step: Operations) -> list[str]:
    """What a plan of a step does with code that is not torch's, a sentence each."""
    found = []
    once = Counter(custom_name(node) for node in step.once if is_unknown(node))
    if once:
        names = ", ".join(f"{name} ({times})" for name, times in sorted(once.items()))
        found.append(f"run once, since a custom operator may do anything: {names}; functional_ops says which do not")
    spoken = sum(_compat.is_collective(node.target) and "wait" not in custom_name(node) for node in step.once)
    if spoken:
        found.append(f"{spoken} collectives run once: see recompute_collectives")
    own = _compat.own_checkpoints(step.flow.joint.graph)
    if own:
        found.append(f"the module's own {own} checkpoints are taken out: the plan says what is computed again")
    return found


def custom_name(node: fx.Node) -> str:
    """What a caller calls the operator of a node."""
    return _compat.full_name(node.target) if isinstance(node.target, _compat.OpOverload) else str(node.target)


def op_name(op: Op) -> str:
    """What to call an op: the module path of its first kernel, and the operators that it runs."""
    if op.kind in (Kind.TURN, Kind.BEFORE_UPDATE, Kind.HALFWAY):
        return str(op.kind.value)
    what = "+".join(_operator_name(n) for n in op.nodes) if op.kind is Kind.KERNELS else op.kind.value
    where = _compat.module_path(op.nodes[0])
    return f"{where}:{what}" if where else what


def _operator_name(node: fx.Node) -> str:
    """The bare name of a node's operator."""
    target = node.target
    return _compat.operator_name(target) if isinstance(target, _compat.OpOverload) else str(node.name)


def on_cpu(node: fx.Node) -> bool:
    """Whether a kernel's outputs lie in host memory."""
    found = next(tensors(node.meta.get("val")), None)
    return found is not None and found.device.type == "cpu"


def _ports(
    flow: Dataflow, nodes: Sequence[fx.Node], originals: Mapping[fx.Node, int], states: Mapping[fx.Node, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    own = {s for n in nodes for s in flow.makes[n]}
    reads: set[int] = set()
    for node in nodes:
        for storage in flow.reads[node]:
            source = flow.owner[storage]
            if storage in own:
                continue
            if source in originals:
                if storage in _state_read(flow, node):
                    reads.add(originals[source])
            elif source.op == "call_function" or source in flow.tangents:
                reads.add(storage)
        if node in states:
            reads.add(states[node])
    return tuple(sorted(reads)), tuple(sorted(own))


def _read_and_overwritten(flow: Dataflow) -> list[fx.Node]:
    """Placeholders that the step overwrites and that some kernel reads for more than their own new value."""
    read = frozenset(s for n in flow.kernels for s in flow.reads[n])
    found = []
    for placeholder, result in flow.mutated.items():
        own, new = frozenset(flow.storages_of[placeholder]), frozenset(flow.storages_of[result])
        made = [frozenset(flow.makes[kernel]) for kernel in flow.kernels if own & _state_read(flow, kernel)]
        if not all(makes <= new and not makes & read for makes in made):
            found.append(placeholder)
    return found


def _state_read(flow: Dataflow, kernel: fx.Node) -> frozenset[int]:
    """The storages that a kernel has to read again when it is recomputed after the forward/backward boundary."""
    variant = stateless(kernel)
    if variant is None:
        return frozenset(flow.reads[kernel])
    arguments = [kernel.args[i] for i in variant[1]]
    return frozenset(flow.storages(arguments))


def _copied_gradients(flow: Dataflow) -> list[tuple[fx.Node, fx.Node]]:
    """Results that autograd clones when it stores them, as which input's: of another layout, or returned twice."""
    seen: set[fx.Node] = set()
    found = []
    for result, primal in zip(flow.backward_results, flow.primals, strict=False):
        if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), torch.Tensor):
            continue  # a process group that the graph takes as an input has no gradient
        shared = result in seen
        seen.add(result)
        if shared or not same_layout(result.meta["val"], primal.meta["val"]):
            found.append((result, primal))
    return found


def _only_what_is_read(flow: Dataflow, ops: list[Op]) -> tuple[list[Op], frozenset[int]]:
    """Ops with only those outputs that another op reads or the step returns, and the storages that stay.

    Those are what is returned, and the gradient of a scalar: autograd holds the seed of a backward pass to its end.
    """
    made = {s for op in ops for s in op.makes}
    copied = {s for op in ops if op.kind is Kind.ACCUMULATE for s in op.reads}
    new_values = set(flow.mutated.values())
    outputs = flow.storages(r for r in flow.forward_results if isinstance(r, fx.Node) and r not in new_values)
    gradients = flow.storages(flow.backward_results)
    single = flow.storages(r for r in flow.backward_results if isinstance(r, fx.Node) and _owns(flow, r))
    keep = outputs | (gradients - (copied - single))
    keep |= {s for op in ops if op.kind is Kind.ACCUMULATE for s in op.makes}
    keep |= flow.storages(t for t in flow.tangents if not t.meta["val"].shape)
    keep &= made
    read = {s for op in ops for s in op.reads}
    wanted = keep | read | (flow.storages(new_values) & made)
    kept = [
        Op(op.kind, op.nodes, op.reads, tuple(s for s in op.makes if s in wanted or op.kind is Kind.TURN)) for op in ops
    ]
    return kept, frozenset(keep)


def _owns(flow: Dataflow, result: fx.Node) -> bool:
    """Whether some gradient keeps its own storage although another, returned with it, is copied."""
    if not isinstance(result.meta.get("val"), torch.Tensor):  # a mesh of processes comes back with its gradients
        return False
    position = flow.backward_results.index(result)
    primal = flow.primals[position] if position < len(flow.primals) else None
    return primal is not None and same_layout(result.meta["val"], primal.meta["val"])


def _runs_once(step: Operations, index: int) -> bool:
    """Kernels that may not run again, and those that nothing but the update of an input reads."""
    turn, op = step.ops[step.turn], step.ops[index]
    return any(n in step.once for n in op.nodes) or (
        bool(op.makes)
        and set(op.makes) <= set(turn.reads)
        and not any(set(op.makes) & set(other.reads) for other in step.ops if other is not turn)
    )


def _workspace(step: Operations, op: Op, measured: Mapping[fx.Node, Profile]) -> int:
    """The bytes that an op needs while it runs beyond its inputs and all its outputs."""
    if op.kind is not Kind.KERNELS:
        return step.takes(op)
    flow = step.flow
    outputs = frozenset(op.makes)
    last: dict[int, int] = {}
    for position, node in enumerate(op.nodes):
        for storage in (*flow.makes[node], *flow.reads[node]):
            last[storage] = position
    total = sum(step.sizes[s] for s in outputs)
    live, worst = 0, 0
    for position, node in enumerate(op.nodes):
        live += sum(step.sizes[s] for s in flow.makes[node])
        worst = max(worst, live + measured[node].workspace_bytes)
        inside = {s for n in op.nodes[: position + 1] for s in flow.makes[n]} - outputs
        live -= sum(step.sizes[s] for s in inside if last[s] == position)
    return max(0, worst - total)


def _with_replay(step: Operations, node: fx.Node, measured: Profile) -> Profile:
    """A replay of a random kernel holds the generator's present state meanwhile."""
    replayed = node in step.states
    return measured._replace(workspace_bytes=measured.workspace_bytes + CPU_GENERATOR_BYTES) if replayed else measured


def getitems(node: fx.Node) -> list[fx.Node]:
    """The getitems of a node that makes several tensors, in graph order, nested ones included."""
    found = []
    for user in node.users:
        if user.target is operator.getitem and user.args[0] is node:
            found.append(user)
            found.extend(getitems(user))
    return found


TRANSPOSED_BLOCK = 60
"""Rows and columns of the block by which the CPU copies a transposed matrix (aten/src/ATen/native/Copy.cpp)."""


def same_layout(gradient: torch.Tensor, variable: object) -> bool:
    """AccumulateGrad's layout contract (torch/csrc/autograd/utils/grad_layout_contract.h)."""
    if not isinstance(variable, torch.Tensor):  # a process group that the graph takes as an input
        return True
    if torch.ops.aten.is_non_overlapping_and_dense.default(variable):
        return all(
            size == 1 or mine == theirs
            for size, mine, theirs in zip(gradient.shape, gradient.stride(), variable.stride(), strict=True)
        )
    return gradient.is_contiguous()


def copying_bytes(gradient: torch.Tensor, variable: torch.Tensor) -> int:
    """The bytes that a copy into the layout of an input takes while it runs.

    A CPU copies the transpose of a contiguous matrix by way of a block, if the matrix is at least as large as one.
    """
    transposed = gradient.dim() == 2 and gradient.stride() == (1, gradient.shape[0]) and variable.is_contiguous()
    by_blocks = gradient.device.type == "cpu" and transposed and gradient.numel() >= TRANSPOSED_BLOCK**2
    return TRANSPOSED_BLOCK**2 * gradient.element_size() if by_blocks else 0
