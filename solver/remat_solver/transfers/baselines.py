"""What others do on a graph with a link: offload only, every saved value to the host, fractions of layers and a greedy.

The last one is the memory policy that is proposed for torchtitan's graph trainer (`auto_perf_maxing`, pull request 4636
of pytorch/torchtitan, `auto_sac_offload_solver.py`), written from its source in our words. A linear program divides the
saved bytes of each layer into fractions that are kept, computed again and moved. Inside a layer a greedy pass ranks the
saved values by the time that one byte of them takes to compute again: from the top they are moved until the fraction
that moves is filled, from the bottom computed again; what is left is kept. Its profile and its passes over the compiled
graph are left out: all baselines get the same costs, and the same placement of their copies.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat_ir import Compute, Drop, Free, Graph, InvalidPlan, Link, Offload, Plan, Prefetch, Step, Wait
from remat_ir.graph import pinned_ops

from ..baselines.heuristics import articulation_points
from ..baselines.recompute import row_of
from ..incumbent import Incumbent
from ..placement import place, saved, timetable
from ..program import Floats

_EFFECTIVE = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the budget that the program of layers is given, whose peaks are estimates: the first that fits counts."""
_MOST_LAYERS = 64


def save_on_cpu(incumbent: Incumbent) -> None:
    """Offer the plan that moves every value which the backward pass reads, and waits for each copy."""
    graph = incumbent.problem.graph
    table = timetable(graph, range(graph.ops))
    out: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    for gap in saved(table):
        out.setdefault(gap.last, []).append(gap.value)
        back.setdefault(gap.next, []).append(gap.value)
    steps: list[Step] = []
    for position, op in enumerate(table.order):
        for value in back.get(position, ()):
            steps += (Prefetch(value), Wait(value))
        steps.append(Compute(op, table.kept[position]))
        steps += (Free(value) for value in table.dying[position])
        for value in out.get(position, ()):
            steps += (Offload(value), Wait(value), Drop(value))
    incumbent.offer_or_say(Plan(tuple(steps)), "save-on-cpu")


def layer_fractions(incumbent: Incumbent) -> None:
    """Offer the plan of the program over layers and the greedy inside them, at the largest budget for it that fits."""
    graph, budget = incumbent.problem.graph, incumbent.problem.budget_bytes
    if not graph.backward_from:
        reason = "layer-fractions does not apply: the graph marks no backward pass after a forward one."
        incumbent.ends_without_plan(reason)
        return
    layers = Layers.of(graph, graph.backward_from)
    for share in _EFFECTIVE:
        fractions = layers.fractions(graph.fixed_bytes + int(share * (budget - graph.fixed_bytes)))
        if fractions is None or incumbent.stopped():
            continue
        decided = layers.decided(fractions)
        held = {value for value, what in decided.items() if what != "again"}
        table = timetable(graph, _sequence(graph, layers.forward, held))
        moved = [gap for gap in saved(table) if decided.get(gap.value) == "moved"]
        with contextlib.suppress(InvalidPlan):
            incumbent.offer_or_say(place(table, budget, moved).plan, "layer-fractions")
            return
    incumbent.ends_without_plan("layer-fractions has no plan within the budget.")


def _sequence(graph: Graph, forward: int, held: set[int]) -> list[int]:
    """Every op once, and before each backward op what makes the forward values again that are not held."""
    pinned = pinned_ops(graph)
    there = held | {value for value, op in enumerate(graph.value_op) if op >= forward or op in pinned}
    order = list(range(forward))
    for op in range(forward, graph.ops):
        row = row_of(graph, op, there)
        order += row
        there |= {value for maker in row for value in graph.op_values[maker]}
    return order


@dataclass(frozen=True)
class Layers:
    """The forward pass in layers, and what each of them saves.

    Attributes:
        link: of the graph. forward: the first backward op.
        saved: per layer, the values that it makes and the backward pass reads.
        kept: the values that are neither computed again nor moved: those that lead from layer to layer, and those of
            ops that run once.
    """

    graph: Graph
    link: Link
    forward: int
    saved: tuple[tuple[int, ...], ...]
    kept: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, forward: int) -> Layers:
        """Layers between the ops that cut the forward pass in two, or √n runs of ops where there are no such ops."""
        assert graph.link is not None
        points = [op for op in articulation_points(graph, forward) if 0 < op < forward - 1]
        root = max(1, math.isqrt(forward))
        if len(points) < 2:
            points = list(range(root, forward - 1, root))
        step = max(1, -(-len(points) // min(_MOST_LAYERS, max(2, root))))
        ends = [*points[step - 1 :: step], forward - 1]
        place_of = np.searchsorted(ends, np.arange(forward))
        read_later: list[list[int]] = [[] for _ in range(int(place_of[-1]) + 1)]
        kept: set[int] = set()
        pinned = pinned_ops(graph)
        for value, op in enumerate(graph.value_op):
            if op >= forward:
                break
            if any(user >= forward for user in graph.users[value]):
                read_later[place_of[op]].append(value)
            later = any(user < forward and int(place_of[user]) > int(place_of[op]) for user in graph.users[value])
            if later or op in pinned or graph.value_bytes[value] == 0:
                kept.add(value)
        return cls(graph, graph.link, forward, tuple(map(tuple, read_later)), frozenset(kept))

    @cached_property
    def temporary(self) -> list[int]:
        """Per layer, the most bytes of gradients and workspace while its part of the backward pass runs."""
        graph = self.graph
        layer_of = {value: layer for layer, values in enumerate(self.saved) for value in values}
        most = [0] * len(self.saved)
        held, layer = 0, len(self.saved) - 1
        for op in range(self.forward, graph.ops):
            layer = max((layer_of[v] for v in graph.op_inputs[op] if v in layer_of), default=layer)
            held += sum(graph.value_bytes[v] for v in graph.op_values[op])
            most[layer] = max(most[layer], held + graph.op_workspace_bytes[op])
            for value in (*graph.op_inputs[op], *graph.op_values[op]):
                last = max((*graph.users[value], graph.value_op[value]))
                if graph.value_op[value] >= self.forward and last == op and value not in graph.keep:
                    held -= graph.value_bytes[value]
        return most

    def fractions(self, budget_bytes: int) -> list[tuple[float, float, float]] | None:
        """Per layer what is kept, computed again and moved, of its saved bytes; None where there is no division."""
        size, count = self.graph.value_bytes, len(self.saved)
        bytes_of = [max(1, sum(size[v] for v in values)) for values in self.saved]
        floor = [sum(size[v] for v in values if v in self.kept) for values in self.saved]
        time = sum(self.graph.op_cost_ns[: self.forward]) / count
        back = sum(self.graph.op_cost_ns[self.forward :]) / count
        room = budget_bytes - self.graph.fixed_bytes
        rows: list[Floats] = []
        limits: list[int] = []
        for layer in range(count):
            kept = np.zeros(3 * count)
            kept[: 3 * layer : 3] = bytes_of[:layer]
            if layer:
                kept[3 * layer - 1] = bytes_of[layer - 1]  # what the layer before moves is still there, or there again
            rows += (kept, kept)
            limits += (room - bytes_of[layer], room - bytes_of[layer] - self.temporary[layer])
        equal = np.zeros((count, 3 * count))
        bounds: list[tuple[float, float]] = []
        for layer in range(count):
            equal[layer, 3 * layer : 3 * layer + 3] = 1.0
            window = min(
                1.0,
                self.link.to_host_bytes_per_s * time / 1e9 / bytes_of[layer],
                self.link.to_device_bytes_per_s * back / 1e9 / bytes_of[layer],
            )
            least = min(1.0, floor[layer] / bytes_of[layer])
            bounds += [(least, 1.0), (0.0, 1.0), (0.0, window if layer < count - 1 else 0.0)]
        if self.link.host_bytes is not None:
            row = np.zeros(3 * count)
            row[2::3] = bytes_of
            rows.append(row)
            limits.append(self.link.host_bytes)
        from scipy.optimize import linprog  # three hundred modules, which every start of the service would read

        cost = np.tile([0.0, time, 0.0], count)
        scale = max(1.0, float(max(bytes_of)))
        found = linprog(
            cost, np.array(rows) / scale, np.array(limits) / scale, equal, np.ones(count), bounds, method="highs"
        )
        if found.x is None:
            return None
        parts = found.x.reshape(count, 3).tolist()
        return [(kept, again, moved) for kept, again, moved in parts]

    def decided(self, fractions: list[tuple[float, float, float]]) -> dict[int, str]:
        """What becomes of each saved value: "kept", "again" or "moved"."""
        graph, found = self.graph, dict[int, str]()
        for values, (keep, _, move) in zip(self.saved, fractions, strict=True):
            total = sum(graph.value_bytes[v] for v in values)
            free = [v for v in values if v not in self.kept]
            ranked = sorted(free, key=lambda v: (-graph.op_cost_ns[graph.value_op[v]] / graph.value_bytes[v], v))
            found |= dict.fromkeys(values, "kept")
            found |= dict.fromkeys(_filled(graph, ranked, move * total), "moved")
            left = [v for v in reversed(ranked) if found[v] == "kept"]
            found |= dict.fromkeys(_filled(graph, left, (1.0 - move - keep) * total), "again")
            stays = [graph.value_bytes[v] for v in values if found[v] == "kept"]
            over = sum(stays) - keep * total
            left = [v for v in left if found[v] == "kept"]
            found |= dict.fromkeys(_filled(graph, left, over, beyond=True), "again")
        return found


def _filled(graph: Graph, ordered: list[int], room: float, *, beyond: bool = False) -> list[int]:
    """Values in their order as far as they fit; `beyond`: and the smallest one that covers what is left."""
    taken: list[int] = []
    for value in ordered:
        if graph.value_bytes[value] <= room:
            taken.append(value)
            room -= graph.value_bytes[value]
    if beyond and room > 0:
        covering = [v for v in ordered if v not in taken and graph.value_bytes[v] >= 0.95 * room]
        taken += sorted(covering, key=lambda v: (graph.value_bytes[v], v))[:1]
    return taken
