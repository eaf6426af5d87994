"""The peak of a step in the code that Inductor generates for it: its allocations, reuses and frees, replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from ..._compat.inductor import Generated
from ...capture.dataflow import tensors
from .regions import REGION

SCALAR_BYTES = 8

Workspace = Callable[[fx.Node], int]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the generated code.

    Attributes:
        backward: whether it is in the backward pass.
        regions: what runs in it.
        peak_bytes: the memory while it runs, above the parameters, buffers and inputs.
    """

    backward: bool
    regions: frozenset[int]
    peak_bytes: int


class _Memory:
    """Bytes by names: storage lives while a name or the caller holds it."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.sizes: list[int] = []
        self.holders: list[int] = []
        self.of: dict[str, int] = {}
        self.items: dict[str, list[str]] = {}
        self.now = self.worst = 0
        self.kernels: list[Kernel] = []

    def alloc(self, name: str, size: int) -> None:
        self.of[name] = len(self.sizes)
        self.sizes.append(size)
        self.holders.append(1)
        self.now += size
        self.worst = max(self.worst, self.now)

    def hold(self, storage: int) -> None:
        self.holders[storage] += 1

    def let_go(self, storage: int) -> None:
        self.holders[storage] -= 1
        if self.holders[storage] == 0:
            self.now -= self.sizes[storage]

    def name(self, name: str, storage: int) -> None:
        self.free(name)
        self.of[name] = storage
        self.hold(storage)

    def free(self, name: str) -> None:
        for item in self.items.pop(name, ()):
            self.free(item)
        if name in self.of:
            self.let_go(self.of.pop(name))

    def play(self, generated: Generated, backward: bool) -> None:
        for event in generated.events:
            work = 0
            if event.kind == "alloc":
                self.alloc(event.name, event.size)
                if event.source:
                    self.items.setdefault(event.source, []).append(event.name)
            elif event.kind == "alias" and event.source in self.of:
                self.name(event.name, self.of[event.source])
            elif event.kind == "free":
                self.free(event.name)
            elif event.kind == "call" and event.node is not None:
                work = self.workspace(event.node)
                self.worst = max(self.worst, self.now + work)
            if regions := frozenset(node.meta[REGION] for node in event.origins if REGION in node.meta):
                self.kernels.append(Kernel(backward, regions, self.now + work))

    def leave(self, generated: Generated) -> list[int | None]:
        """The generated code returns: only its results stay. Returns the storage of each result."""
        found = [self.of.get(name) if name is not None else None for name in generated.outputs]
        for storage in found:
            if storage is not None:
                self.hold(storage)
        for name in list(self.of):
            self.free(name)
        return found


def step_memory(
    forward: Generated, backward: Generated, tangents: Sequence[int], results: int, work: Workspace
) -> tuple[int, list[Kernel]]:
    """The peak in bytes above the parameters, buffers and inputs, and the kernels that allocate, in order.

    Args:
        forward, backward: what Inductor generates for the two passes.
        tangents: [incoming gradients] bytes; they come after the saved tensors among the backward pass's inputs.
        results: how many of the forward pass's outputs are the caller's.
        work: the bytes that a kernel of torch's own needs while it runs, beyond inputs and outputs.
    """
    memory = _Memory(work)
    memory.play(forward, backward=False)
    saved = memory.leave(forward)[results:]
    for name, storage in zip(backward.inputs, saved, strict=False):
        if storage is not None:
            memory.of[name] = storage  # the hold of the forward pass's result becomes the name's
    for name, size in zip(backward.inputs[len(saved) :], tangents, strict=False):
        memory.alloc(name, size)
        if size <= SCALAR_BYTES:
            memory.hold(memory.of[name])  # a loss's own gradient, which backward() holds to its end
    memory.play(backward, backward=True)
    return memory.worst, memory.kernels


def tangent_bytes(backward: fx.GraphModule, saved: int) -> list[int]:
    """Bytes of each incoming gradient."""
    inputs = [n for n in backward.graph.nodes if n.op == "placeholder"]
    return [sum(t.numel() * t.element_size() for t in tensors(n.meta.get("val"))) for n in inputs[saved:]]
