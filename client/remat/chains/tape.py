"""What a stage leaves for its backward step: autograd's own graph, which may let go of its input and of itself.

A graph refers to tensors through saved-tensor hooks where a plan frees or moves what it refers to: to the stage's input
by its cut, so that whatever is stored there when the backward step comes is read; to what the stage made by blocks that
a transfer can empty and fill again. Elsewhere autograd holds its tensors itself, without hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from .._compat import version_counter
from ..lowering.link import Place


@dataclass(eq=False)
class Block:
    """A storage that can leave the device: None while it is on the host only."""

    storage: torch.UntypedStorage | None


@dataclass(eq=False)
class _Saved:
    """What autograd holds in place of a tensor: the tensor itself, a part of a block, or of the input at a cut."""

    version: int
    tensor: torch.Tensor | None = None
    place: Place | None = None
    block: Block | None = None
    cut: int | None = None
    overwritten: bool = False


class Packing:
    """The hooks of one run of a stage.

    Args:
        inputs: the tensors that the stage reads, by cut.
        fixed: modules whose parameters and buffers stay where they are.
        moves: whether what the stage makes may leave the device.
        lookup: gives what is stored at a cut when a backward step reads it.
    """

    def __init__(
        self,
        inputs: Mapping[int, torch.Tensor],
        fixed: nn.Module,
        moves: bool,
        lookup: Callable[[int], torch.Tensor],
    ) -> None:
        self._places = {cut: (Place.of(x), x.untyped_storage().nbytes()) for cut, x in inputs.items()}
        self._cuts = {_address(x): cut for cut, x in inputs.items() if _plain(x) and x.untyped_storage().nbytes()}
        self._fixed = {_address(t) for t in (*fixed.parameters(), *fixed.buffers()) if _plain(t)} if moves else set()
        self._moves, self._lookup = moves, lookup
        self._watched: list[tuple[torch.Tensor, _Saved]] = []
        self.blocks: dict[int, Block] = {}

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """What autograd is to hold in place of a tensor that it saves."""
        saved = _Saved(version_counter(tensor))
        address = _address(tensor) if _plain(tensor) else 0
        if address in self._cuts:
            saved.cut = self._cuts[address]
        elif address and self._moves and address not in self._fixed:
            saved.block = self.block(tensor)
        else:
            saved.tensor = tensor if tensor.is_leaf else tensor.detach()  # with its graph it would hold itself
            return saved
        saved.place = Place.of(tensor)
        self._watched.append((tensor, saved))
        return saved

    def block(self, tensor: torch.Tensor) -> Block:
        """The block of a tensor's storage."""
        return self.blocks.setdefault(_address(tensor), Block(tensor.untyped_storage()))

    def recorded(self) -> None:
        """The stage has run: from here on nobody else refers to what it saved."""
        for tensor, saved in self._watched:
            saved.overwritten = version_counter(tensor) != saved.version
        self._watched.clear()

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """The tensor that a backward step reads.

        Raises:
            RuntimeError: it was overwritten after it was saved, as autograd itself would say.
        """
        if saved.overwritten or (saved.tensor is not None and version_counter(saved.tensor) != saved.version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        if saved.tensor is not None:
            return saved.tensor
        assert saved.place is not None
        if saved.block is not None:
            assert saved.block.storage is not None, "a plan that the verifier passed reads what is on the device"
            return saved.place.on(saved.block.storage)
        assert saved.cut is not None
        return self._of_input(saved.cut, saved.place)

    def _of_input(self, cut: int, place: Place) -> torch.Tensor:
        now, (then, size) = self._lookup(cut), self._places[cut]
        if place == then:
            return now.detach()
        if Place.of(now) == then and now.untyped_storage().nbytes() == size:
            return place.on(now.untyped_storage())
        # it was made again in another layout: the view needs the first one
        storage = torch.empty(size, dtype=torch.uint8, device=now.device).untyped_storage()
        then.on(storage).copy_(now)
        return place.on(storage)


@dataclass(eq=False)
class Tape:
    """A recorded run: where its graph ends, and where the gradients of what it read come out.

    Attributes:
        edge: the end of the graph, or None where nothing in the stage has a gradient.
        inputs: a list for each input, of its gradient once the backward step has run.
        parameters: the same for each parameter whose gradient is collected, by name.
    """

    edge: GradientEdge | None
    inputs: list[list[torch.Tensor]]
    parameters: dict[str, list[torch.Tensor]]
    packing: Packing | None

    def backward(self, given: torch.Tensor | None) -> None:
        """Run the graph, which is freed on the way."""
        edge, self.edge = self.edge, None
        if self.packing is not None:
            self.packing.blocks.clear()  # from here on only the graph holds them, and drops each as autograd would
        if edge is not None and given is not None:
            torch.autograd.backward((edge,), (given,))


@dataclass(eq=False)
class Held:
    """What is stored at a cut: an activation, and with it perhaps its stage's tape.

    While it is on the host only, `activation` is None.
    """

    activation: torch.Tensor | None
    tape: Tape | None = None
    blocks: list[Block] = field(default_factory=list)
    place: Place | None = None

    def settle(self) -> list[torch.UntypedStorage]:
        """Make everything that can leave the device a block; returns their storages."""
        assert self.activation is not None
        if not self.blocks:
            self.place = Place.of(self.activation)
            packing = self.tape.packing if self.tape is not None else None
            own = Block(self.activation.untyped_storage()) if packing is None else packing.block(self.activation)
            self.blocks = [own, *(b for b in (packing.blocks.values() if packing is not None else ()) if b is not own)]
        return [block.storage for block in self.blocks if block.storage is not None]

    def leave(self) -> None:
        """Let go of the device's copy."""
        self.activation = None
        for block in self.blocks:
            block.storage = None

    def arrive(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take storages in place of those that left."""
        for block, storage in zip(self.blocks, storages, strict=True):
            block.storage = storage
        assert self.place is not None
        self.activation = self.place.on(storages[0])


class _Entry(torch.autograd.Function):
    """Lets a tensor into a graph and its gradient out, without a leaf, which would hold the tensor's storage."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, out: list[torch.Tensor]) -> torch.Tensor:
        ctx.out = out
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is not None:
            ctx.out.append(gradients[0])
        return None, None, None


def _let_in(anchor: torch.Tensor, x: torch.Tensor, out: list[torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = _Entry.apply(anchor, x.detach(), out)  # type: ignore[no-untyped-call]
    return made


def record(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    collected: Mapping[str, torch.Tensor] | None = None,
    packing: Packing | None = None,
) -> tuple[torch.Tensor, Tape]:
    """Run a stage with grad: what it gives, and its tape.

    Args:
        needs: for each input, whether its gradient is wanted.
        collected: parameters by name whose gradients come out of the tape and are not accumulated.
    """
    with torch.enable_grad():
        anchor = torch.empty(0, device=inputs[0].device, requires_grad=True)
        outs: list[list[torch.Tensor]] = [[] for _ in inputs]
        given = [
            _let_in(anchor, x, out) if need else x.detach() for x, need, out in zip(inputs, needs, outs, strict=True)
        ]
        swapped: dict[str, torch.Tensor] = {}
        parameters: dict[str, list[torch.Tensor]] = {name: [] for name in collected or {}}
        for name, parameter in (collected or {}).items():
            swapped[name] = _let_in(anchor, parameter, parameters[name])
        hooks = saved_tensors_hooks(packing.pack, packing.unpack) if packing is not None else contextlib.nullcontext()
        with hooks:
            y = torch.func.functional_call(module, swapped, tuple(given)) if swapped else module(*given)
    if packing is not None:
        packing.recorded()
    edge = get_gradient_edge(y) if isinstance(y, torch.Tensor) and y.requires_grad else None
    return y.detach() if isinstance(y, torch.Tensor) else y, Tape(edge, outs, parameters, packing)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is just its place in its storage."""
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    return type(tensor) in kinds and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
