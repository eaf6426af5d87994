"""The stages of networks as chains, counted on meta tensors: nothing is computed, and all machines count the same.

A kernel takes the longer of its FLOPs at 15.7 TFLOP/s and its bytes, those of all tensors that it reads and writes, at
900 GB/s, which is what the data sheet of an NVIDIA V100 (SXM2) says of 32-bit floats, and 4 µs for its launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.models.stages import stages_of
from remat_ir import Chain

FLOPS_PER_NS = 15_700
BYTES_PER_NS = 900
LAUNCH_NS = 4_000


class Counted(TorchDispatchMode):
    """Adds up the ns of the kernels that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ns = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._overloadpacket is not torch.ops.aten.detach:
            moved = sum(t.numel() * t.itemsize for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor))
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            self.ns += max(-(-flops // FLOPS_PER_NS), -(-moved // BYTES_PER_NS)) + LAUNCH_NS
        return out


def network_chain(name: str, batch: int, image: int) -> Chain:
    """A network of Rotor's paper for square images, stage by stage; its stages' inputs are what may be stored.

    Raises:
        KeyError: no network has that name.
    """
    with torch.device("meta"):
        stages = stages_of(name, batch)
        x = torch.empty(batch, 3, image, image)
    forward, backward, tape, activation = [], [], [], [x.numel() * x.itemsize]
    for stage in stages:
        x = x.detach().requires_grad_()
        outside = {t.untyped_storage()._cdata for t in (x, *stage.parameters(), *stage.buffers())}
        saved: dict[int, torch.Tensor] = {}

        def pack(t: torch.Tensor, outside: set[int] = outside, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            if t.untyped_storage()._cdata not in outside:
                saved[t.untyped_storage()._cdata] = t
            return t

        with Counted() as ahead, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = stage(x)
        saved[out.untyped_storage()._cdata] = out
        gradient = torch.ones_like(out)
        with Counted() as back:
            out.backward(gradient)
        forward.append(ahead.ns)
        backward.append(back.ns)
        tape.append(sum(t.untyped_storage().nbytes() for t in saved.values()))
        activation.append(out.numel() * out.itemsize)
        x = out
    count = len(stages)
    return Chain(
        forward_ns=tuple(forward),
        backward_ns=tuple(backward),
        forward_workspace_bytes=(0,) * count,
        backward_workspace_bytes=(0,) * count,
        tape_bytes=tuple(tape),
        activation_bytes=tuple(activation),
        gradient_bytes=tuple(activation),
    )
