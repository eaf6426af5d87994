"""From a verified plan to a forward and a backward graph in which a recomputation is a second node."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from remat_ir import Compute, Free, Plan, Step

from .. import _compat
from ..capture.dataflow import is_check, is_random, maker, stateless, tensors
from ..capture.operations import Kind, Op, Operations, getitems, on_cpu
from ..device import of
from .codegen import halfway
from .transfers import Crossing, Transfers

Update: TypeAlias = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Lowered:
    """The two graphs of a planned step, in AOTAutograd's convention.

    `forward` takes the primals and returns the forward results, then what the backward pass needs; `backward` takes
    that and the tangents and returns the gradients. A value is freed by its last use. `reread` are the primals from
    which the backward pass computes something again, `read_late` all that it reads.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: int
    reread: frozenset[fx.Node]
    read_late: frozenset[fx.Node]


def lower(step: Operations, plan: Plan, update: Update | None = None) -> Lowered:
    """Emit a plan for the ops of a step. The plan must have passed the verifier on the step's graph.

    Args:
        update: takes the position of a parameter among the tensors given, and its gradient, which is then gone.
    """
    return _Lowering(step, plan, update).run()


def save_state(device: str) -> torch.Tensor:
    """A copy of a generator's state."""
    return of(device).generator_state()


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator as it ran when the state was saved, and leave the generator as it is now.

    Raises:
        RuntimeError: the device's work is being captured, and what is captured cannot set a generator.
    """
    there = of(device)
    if there.capturing():
        raise RuntimeError(
            f"the plan computes {target} again, and no generator can be set while {device} is being captured as a "
            "graph of kernels: train without such graphs, without dropout, or inside a budget that needs no plan"
        )
    now = there.generator_state()
    there.set_generator_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        there.set_generator_state(now)


class _Lowering:
    def __init__(self, step: Operations, plan: Plan, update: Update | None) -> None:
        self.step, self.flow, self.update = step, step.flow, update
        self.steps = plan.steps
        self.turn = next(i for i, s in enumerate(self.steps) if isinstance(s, Compute) and s.op == step.turn)
        self.times = Counter(s.op for s in self.steps if isinstance(s, Compute))
        self.op_of = {n: i for i, op in enumerate(step.ops) if op.kind is Kind.KERNELS for n in op.nodes}
        self.forward = Pass()
        self.backward = Pass()
        self.saved_as: dict[fx.Node, fx.Node] = {}
        self.done: set[int] = set()
        self.reread: set[fx.Node] = set()
        self.late_originals = self._originals_read_late()
        self.transfers = Transfers(step, self._present, self._carry)

    def run(self) -> Lowered:
        forward, backward = self.forward, self.backward
        for primal in self.flow.primals:
            forward.env[primal] = forward.placeholder(str(primal.target), primal)
        self._emit_all(self.steps[: self.turn], (forward,))
        results = [self._get(forward, r) if isinstance(r, fx.Node) else r for r in self.flow.forward_results]
        for tangent in self.flow.tangents:
            backward.env[tangent] = backward.placeholder(str(tangent.target), tangent)
        self._emit_all(self.steps[self.turn + 1 :], (forward, backward))
        gone = {i for i, primal in enumerate(self.flow.primals) if primal in self.step.updates} | set(self.step.early)
        gradients = [
            self._get(backward, r) if isinstance(r, fx.Node) and i not in gone else None
            for i, r in enumerate(self.flow.backward_results)
        ]
        return self._finish(results, gradients)

    def _finish(self, results: list[Any], gradients: list[Any]) -> Lowered:
        descriptors = _compat.descriptors(self.flow.joint.graph)
        first = len(self.flow.forward_results)
        backward = self.backward.close(gradients, descriptors[first:])
        # only what the backward graph still reads is saved; placeholders come in the order of the saved results
        pairs = [(kept, source) for source, kept in self.saved_as.items() if kept.users]
        for source, kept in list(self.saved_as.items()):
            if not kept.users:
                backward.erase_node(kept)
                del self.saved_as[source]
        pairs.sort(key=lambda pair: (_is_size(pair[0]), pair[1].target is Crossing, _compat.saved_unchecked(pair[0])))
        tangents = [n for n in backward.nodes if n.op == "placeholder" and n not in {k for k, _ in pairs}]
        sizes = [k for k, _ in pairs if _is_size(k)]  # saved last, and given first
        _reorder_placeholders(backward, [*sizes, *(k for k, _ in pairs if not _is_size(k)), *tangents])
        saved = [source for _, source in pairs]
        forward = self.forward.close([*results, *saved], descriptors[:first] + [None] * len(saved))
        joint = self.flow.joint
        late = frozenset(primal for primal in self.flow.primals if self.saved_as.get(self.forward.env[primal]))
        return Lowered(
            fx.GraphModule(joint, forward),
            fx.GraphModule(joint, backward),
            len(saved),
            frozenset(self.reread),
            late,
        )

    def _originals_read_late(self) -> frozenset[int]:
        """Copies of overwritten inputs that the backward pass reads; the forward pass reads the input itself."""
        originals = frozenset(self.step.originals.values())
        late = (self.step.ops[c.op] for c in self.steps[self.turn :] if isinstance(c, Compute))
        return frozenset(s for op in late for s in op.reads if s in originals)

    def _emit_all(self, steps: Sequence[Step], passes: tuple[Pass, ...]) -> None:
        """Emit steps of the plan into the last of the passes that have begun."""
        for step in steps:
            if isinstance(step, Compute):
                self._emit(passes[-1], self.step.ops[step.op], step.op)
            elif isinstance(step, Free):
                self.transfers.free(step.value)
            else:
                self.transfers.emit(step, passes)

    def _present(self, into: Pass, table: str, key: fx.Node) -> fx.Node | None:
        """The node that stands for a key of a pass's table now; None: the lowered step has no such tensor."""
        if table == "env":
            return self._get(into, key)
        if table == "states":
            return self._state(into, key) if key in self.forward.states or key in into.states else None
        return self._get(into, key) if self.step.originals[key] in self.late_originals else None

    def _emit(self, into: Pass, op: Op, index: int) -> None:
        again = index in self.done
        self.done.add(index)
        if op.kind is Kind.ORIGINAL:
            placeholder = op.nodes[0]
            if op.makes[0] in self.late_originals:
                copy = into.call(
                    torch.ops.aten.clone.default, (into.env[placeholder],), {}, placeholder.name + "_original"
                )
                copy.meta = {"val": placeholder.meta.get("val")}
                into.originals[placeholder] = copy
        elif op.kind is Kind.RANDOM_STATE:
            node = op.nodes[0]
            if self._replayed(node):
                self._save_state(into, node)
        elif op.kind is Kind.UPDATE:
            self._update(into, op.nodes[0])
        elif op.kind is Kind.HALFWAY:
            results = [self.flow.backward_results[i] for i in self.step.early]
            given = tuple(self._get(into, r) if isinstance(r, fx.Node) else r for r in results)
            into.pinned.add(into.call(halfway, (given,), {}, "halfway"))
        elif op.kind is Kind.KERNELS:
            for node in op.nodes:
                self._kernel(into, node, again)
            if again and into is self.backward:
                owners = {self.flow.owner[s] for node in op.nodes for s in self.flow.reads[node]}
                self.reread |= owners & set(self.flow.primals)

    def _update(self, into: Pass, primal: fx.Node) -> None:
        assert self.update is not None
        position = self.flow.primals.index(primal)
        result = self.flow.backward_results[position]
        place = self.flow.given.index(primal)
        made = into.call(self.update, (place, self._get(into, result)), {}, primal.name + "_update")
        into.pinned.add(made)

    def _replayed(self, node: fx.Node) -> bool:
        return self.times[self.op_of[node]] > 1

    def _save_state(self, into: Pass, node: fx.Node) -> None:
        state = into.call(save_state, (_device(node),), {}, node.name + "_state")
        # AOTAutograd counts the tensors that are saved by their fake ones
        like = next(tensors(node.meta["val"]))
        state.meta = {"val": like.new_empty(0, dtype=torch.uint8, device="cpu")}
        into.states[node] = state

    def _kernel(self, into: Pass, node: fx.Node, again: bool) -> None:
        into.forget(self.flow.makes[node])
        variant = stateless(node) if again and into is self.backward else None
        taken = [node.args[i] for i in variant[1]] if variant else node.args
        args: tuple[Any, ...] = fx.map_arg(tuple(taken), lambda a: self._get(into, a))
        kwargs = fx.map_arg(node.kwargs, lambda a: self._get(into, a))
        if is_random(node) and again:
            target: Any = replay
            args = (self._state(into, node), _device(node), node.target, *args)
        else:
            if is_random(node) and not on_cpu(node) and self._replayed(node):
                self._save_state(into, node)
            target = variant[0] if variant else node.target
        made = into.call(target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        if is_check(node) or (is_random(node) and not again):
            into.pinned.add(made)
        into.env[node] = made
        for item in getitems(node):
            if variant and item.args[0] is node and int(str(item.args[1])) > 2:
                continue  # new running statistics, which nothing reads after the forward/backward boundary
            piece = into.call(operator.getitem, (into.env[item.all_input_nodes[0]], item.args[1]), {}, item.name)
            piece.meta = dict(item.meta)
            into.env[item] = piece

    def _state(self, into: Pass, node: fx.Node) -> fx.Node:
        if node not in into.states:
            into.states[node] = self._carry(self.forward.states[node], node.name + "_state")
        return into.states[node]

    def _get(self, into: Pass, node: fx.Node) -> fx.Node:
        """The node that stands for a node of the joint graph now, views made anew where they are not at hand."""
        if node.op == "placeholder":
            if node in self.step.originals and self.step.originals[node] in self.late_originals:
                if node not in into.originals:
                    into.originals[node] = self._carry(self.forward.originals[node], node.name + "_original")
                return into.originals[node]
            return into.env[node] if node in into.env else self._save(into, node)
        if node in into.env:
            return into.env[node]
        if maker(node) in self.flow.makes:
            return self._save(into, node)
        return into.view(node, lambda a: self._get(into, a), self.flow.storages_of.get(node, ()))

    def _save(self, into: Pass, node: fx.Node) -> fx.Node:
        assert into is self.backward, f"{node.name} is not resident, although the plan was verified"
        kept = into.env[node] = self._carry(self.forward.env[node], node.name)
        return kept

    def _carry(self, source: fx.Node, name: str) -> fx.Node:
        if source not in self.saved_as:
            kept = self.backward.placeholder("saved_" + name, source)
            self.saved_as[source] = kept
        return self.saved_as[source]


class Pass:
    """One of the two graphs while it grows: what stands for which node of the joint graph right now."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.states: dict[fx.Node, fx.Node] = {}
        self.originals: dict[fx.Node, fx.Node] = {}
        self.pinned: set[fx.Node] = set()
        self._views: dict[int, list[fx.Node]] = {}
        self._last_placeholder: fx.Node | None = None

    def table(self, name: str) -> dict[fx.Node, fx.Node]:
        """One of the three, by its name."""
        return {"env": self.env, "states": self.states, "originals": self.originals}[name]

    def placeholder(self, name: str, like: fx.Node) -> fx.Node:
        last = self._last_placeholder
        with self.graph.inserting_before() if last is None else self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        node.meta = dict(like.meta)
        self._last_placeholder = node
        return node

    def call(self, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
        return self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)

    def view(self, node: fx.Node, get: Callable[[fx.Node], fx.Node], storages: tuple[int, ...]) -> fx.Node:
        if node.op == "get_attr":
            made = self.graph.get_attr(str(node.target))
        else:
            made = self.call(node.target, fx.map_arg(node.args, get), fx.map_arg(node.kwargs, get), node.name)
        made.meta = dict(node.meta)
        self.env[node] = made
        for storage in storages:
            self._views.setdefault(storage, []).append(node)
        return made

    def forget(self, storages: tuple[int, ...]) -> None:
        """A storage is made again: views of the earlier instance no longer stand for it."""
        for storage in storages:
            for view in self._views.pop(storage, ()):
                self.env.pop(view, None)

    def close(self, results: list[Any], descriptors: list[Any]) -> fx.Graph:
        self.graph.output(tuple(results))
        _compat.set_descriptors(self.graph, descriptors)
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users and node not in self.pinned:
                self.graph.erase_node(node)
        return self.graph


def _reorder_placeholders(graph: fx.Graph, order: list[fx.Node]) -> None:
    for node in reversed(order):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a number, which every call has anew."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def _device(node: fx.Node) -> str:
    return str(next(tensors(node.meta["val"])).device)
