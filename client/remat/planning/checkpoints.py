"""What checkpoints around modules come to, as plans of a captured step: each block's, and the flags of other stacks.

A checkpoint saves nothing inside, and all of it runs again when the backward pass first needs something of it. None of
these keeps to a budget: a peak is what it is. Every setting of a stack's flags is evaluated, so the best is exact.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from remat_ir import (
    Graph,
    InvalidData,
    InvalidPlan,
    Plan,
    Problem,
    permitted,
    plan_of,
    readable,
    verify,
    without_unread,
)

SAVED = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))
"""What selective checkpoints keep, with everything that has attention in its name."""
Chunks = Sequence[Sequence[int]]
"""Forward ops that are checkpointed together, each chunk ascending."""
Way = tuple[str, Chunks] | tuple[str, Chunks, frozenset[int]]
"""A setting as it is written, what it checkpoints, and what of that it saves all the same."""

_BLOCK = re.compile(r"^(.*?)(?:^|\.)(\d+)(?=[.:])")
_PARTS = {"core_attn": r"attn|attention", "mlp": r"mlp|feed_forward|ffn|fc\d?", "layernorm": r"norm|ln_?\d?"}
"""Megatron's names of modules that it recomputes selectively, and what is taken for them in a path."""
_COSTLY = re.compile(r"(mm|addmm|bmm|baddbmm|convolution|linear|max|topk|_scaled_dot_product\w*|_scaled_mm)$")
"""What torchtitan's selective checkpoints save, but for every second product `mm`."""
_ANY = 2**52


def per_block(graph: Graph) -> Plan:
    """All of a block runs again when the backward pass comes to it, as with `torch.utils.checkpoint` around each.

    What must not run again is left out.

    Example:
        >>> from remat_ir import graph_of
        >>> from dataclasses import replace
        >>> names = ("h.0:mm", "h.0:tanh", "h.1:mm", "h.1:tanh", "loss", "loss", "h.1:mm", "h.0:mm")
        >>> graph = graph_of([1] * 8, [8] * 8, [[], [0], [1], [2], [3], [4], [5, 3, 2], [6, 1, 0]], backward_from=5)
        >>> per_block(replace(graph, op_names=names)).computes
        (0, 1, 2, 3, 4, 5, 2, 6, 0, 7)

    Raises:
        InvalidData: as `numbered_blocks`.
    """
    return _permitted(graph, _every_block(graph))


def selective(graph: Graph) -> Plan:
    """The same, but what products, convolutions and attention return is kept.

    Raises:
        InvalidData: as `numbered_blocks`.
    """
    blocks = _every_block(graph)
    saved = {op for ops in blocks for op in ops if any(o in SAVED or "attention" in o for o in _operators(graph, op))}
    return _permitted(graph, blocks, frozenset(saved))


def by_regions(graph: Graph, regions: Sequence[int | None]) -> Plan:
    """What checkpoints around given ops come to: all of a region runs again when the backward pass reads any of it.

    Args:
        regions: [ops] which region each op of the forward pass is in.
    """
    chunks: dict[int, list[int]] = defaultdict(list)
    for op, region in enumerate(regions[: graph.backward_from]):
        if region is not None:
            chunks[region].append(op)
    return _permitted(graph, list(chunks.values()))


def _permitted(graph: Graph, chunks: Chunks, saved: frozenset[int] = frozenset()) -> Plan:
    order = permitted(graph, _checkpointed(graph, chunks, saved))
    return plan_of(graph, without_unread(graph, tuple(order)))


def _operators(graph: Graph, op: int) -> list[str]:
    assert graph.op_names is not None
    return graph.op_names[op].rpartition(":")[2].split("+")


@dataclass(frozen=True)
class Setting:
    """A setting of a stack's flags on a graph.

    Attributes:
        flags: as they are written there.
        plan: what they make a step do. cost_ns, peak_bytes: of it, fixed bytes included.
    """

    flags: str
    plan: Plan
    cost_ns: int
    peak_bytes: int


def best_flags(graph: Graph, stack: str, budget_bytes: int) -> Setting:
    """The cheapest setting of a stack's flags whose peak is within the budget.

    Raises:
        InvalidData: the stack is not known; the graph has no names, no backward pass or no repeated blocks; or no
            setting fits, and then the message says the least that one needs.
    """
    found = every_setting(graph, stack)
    fitting = [setting for setting in found if setting.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(found, key=lambda setting: setting.peak_bytes)
        raise InvalidData(
            f"no setting of {stack} fits {readable(budget_bytes)}; the least is {readable(least.peak_bytes, up=True)}, "
            f"by {least.flags}"
        )
    return min(fitting, key=lambda setting: (setting.cost_ns, setting.peak_bytes))


def every_setting(graph: Graph, stack: str) -> list[Setting]:
    """All that a stack's flags can express on a graph, each evaluated.

    Raises:
        InvalidData: as `best_flags`.
    """
    if stack not in STACKS:
        raise InvalidData(f"--for takes {', '.join(sorted(STACKS))}, not {stack!r}")
    if graph.backward_from is None:
        raise InvalidData("the graph marks no backward pass")
    ways = STACKS[stack](graph, list(numbered_blocks(graph).values()))
    found = [evaluated(graph, flags, chunks, *saved) for flags, chunks, *saved in ways]
    return [setting for setting in found if setting.peak_bytes < _ANY]


def evaluated(graph: Graph, flags: str, chunks: Chunks, saved: frozenset[int] = frozenset()) -> Setting:
    """What checkpoints of chunks come to; its cost and peak are beyond any budget where an op must not run again."""
    plan = plan_of(graph, _checkpointed(graph, chunks, saved))
    try:
        return Setting(flags, plan, *verify(Problem(graph, _ANY), plan))
    except InvalidPlan:
        return Setting(flags, plan, _ANY, _ANY)


def numbered_blocks(graph: Graph) -> dict[str, list[int]]:
    """The forward ops of each of the repeated blocks that hold the most time, by the paths of these, in order.

    Raises:
        InvalidData: the graph has no names, or no module path with a number.
    """
    series = _series(graph)
    time = {
        prefix: sum(graph.op_cost_ns[op] for ops in found.values() for op in ops) for prefix, found in series.items()
    }
    most = series[max(sorted(series), key=lambda prefix: time[prefix])]
    return {path: most[path] for path in sorted(most, key=lambda path: int(path.rpartition(".")[2]))}


def _every_block(graph: Graph) -> Chunks:
    return [ops for numbered in _series(graph).values() for ops in numbered.values()]


def _series(graph: Graph) -> dict[str, dict[str, list[int]]]:
    """By the path of a list of modules, and the path of each in it, its forward ops."""
    if graph.op_names is None:
        raise InvalidData("the graph has no names of modules, for flags and checkpoints: capture it by remat capture")
    series: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for op in range(graph.backward_from or 0):
        place = _BLOCK.match(graph.op_names[op])
        if place is not None:
            series[place[1]][place[0]].append(op)
    if not series:
        raise InvalidData("the model has no numbered blocks, such as layers.0 and layers.1, for flags to name")
    return series


def _checkpointed(graph: Graph, chunks: Chunks, saved: frozenset[int]) -> list[int]:
    """The ops as they run: of a chunk, all that is not saved once more when the backward pass first needs any of it."""
    boundary, keep = graph.backward_from or 0, frozenset(graph.keep)
    again: dict[int, list[int]] = {}  # op → what runs again with it
    for chunk in chunks:
        outside = frozenset(range(boundary)).difference(chunk)
        own = [op for op in chunk if graph.last_stage[op] != op and op not in saved]
        given = {v for op in own for v in graph.op_values[op] if v in keep or outside.intersection(graph.users[v])}
        own = [op for op in own if not given.intersection(graph.op_values[op])]
        needed = [op for op in own if any(u >= boundary for v in graph.op_values[op] for u in graph.users[v])]
        runs = [op for op in own if op <= max(needed, default=-1)]
        again |= dict.fromkeys(runs, runs)
    sequence = list(range(boundary))
    for op in range(boundary, graph.ops):
        for maker in sorted(graph.value_op[value] for value in graph.op_inputs[op]):
            runs = again.get(maker, [])
            sequence += runs
            for done in runs:
                again.pop(done, None)
        sequence.append(op)
    return sequence


def _switch(off: str, on: str) -> Callable[[Graph, Chunks], Iterator[Way]]:
    """Every block checkpointed, or none."""
    return lambda graph, blocks: iter(((off, ()), (on, blocks)))


def _torchtitan(graph: Graph, blocks: Chunks) -> Iterator[Way]:
    yield "activation-checkpoint:none", ()
    yield "activation-checkpoint:full", blocks
    saved = set()
    for block in blocks:
        products = 0
        for op in block:
            operators = _operators(graph, op)
            products += "mm" in operators
            if any(_COSTLY.match(name) for name in operators) and not ("mm" in operators and products % 2 == 0):
                saved.add(op)
    yield "activation-checkpoint:selective", blocks, frozenset(saved)


def _megatron(graph: Graph, blocks: Chunks) -> Iterator[Way]:
    yield "no --recompute-granularity", ()
    count = len(blocks)
    full = "--recompute-granularity full"
    for layers in range(1, count + 1):
        yield f"{full} --recompute-method block --recompute-num-layers {layers}", blocks[:layers]
        joined = [[op for block in blocks[start : start + layers] for op in block] for start in range(0, count, layers)]
        yield f"{full} --recompute-method uniform --recompute-num-layers {layers}", joined
    parts = {name: _parts(graph, blocks, pattern) for name, pattern in sorted(_PARTS.items())}
    there = [name for name, chunks in parts.items() if chunks]
    for size in range(1, len(there) + 1):
        for names in combinations(there, size):
            chunks = [chunk for name in names for chunk in parts[name]]
            yield f"--recompute-granularity selective --recompute-modules {' '.join(names)}", chunks


def _nemo(graph: Graph, blocks: Chunks) -> Iterator[Way]:
    for flags, chunks, *_ in _megatron(graph, blocks):
        words = re.sub(r"--recompute-([a-z-]+) ", lambda found: f"recompute_{found[1].replace('-', '_')}=", flags)
        yield words.replace("no --recompute-granularity", "recompute_granularity=null"), chunks


def _parts(graph: Graph, blocks: Chunks, pattern: str) -> list[list[int]]:
    """The ops of each module in each block whose name in the path is like a pattern."""
    assert graph.op_names is not None
    found: list[list[int]] = []
    for block in blocks:
        chunks: dict[str, list[int]] = defaultdict(list)
        for op in block:
            for part in graph.op_names[op].partition(":")[0].split("."):
                if re.search(pattern, part):
                    chunks[part].append(op)
                    break
        found += [chunks[part] for part in sorted(chunks)]
    return found


STACKS: dict[str, Callable[[Graph, Chunks], Iterator[Way]]] = {
    "deepspeed": _switch("no checkpoint() calls", "deepspeed.checkpointing.checkpoint() around each block"),
    "hf": _switch("gradient_checkpointing=False", "gradient_checkpointing=True"),
    "megatron": _megatron,
    "nemo": _nemo,
    "torchtitan": _torchtitan,
}
LOST = {
    "deepspeed": "DeepSpeed's configuration chooses no layers: a block is checkpointed where the code says so",
    "hf": "the switch is on for every block or off",
    "torchtitan": "a mode applies to every block; memory-budget is the compiler's, and bounds no peak",
}
"""What a stack's flags cannot say."""
