"""What a training job would use in place of remat, each as a module that trains one step of the same weights.

- plain: eager autograd.
- checkpoint: `torch.utils.checkpoint` around the forward of each block, not reentrant, RNG state kept: what
  `gradient_checkpointing_enable()` does.
- selective: the same with `create_selective_checkpoint_contexts`, which saves what matrix products, convolutions and
  attention return, and recomputes the rest.
- aot_eager: `torch.compile(model, backend="aot_eager", fullgraph=True)`.
- amb x: the same, compiled while `torch._functorch.config.activation_memory_budget` is x; `aot_eager` cuts its joint
  graph by `min_cut_rematerialization_partition`, which reads it; at 1.0, the default, it is `aot_eager`.
- each once: the joint graph that remat captures, cut by AOTAutograd's `default_partition`, nothing recomputed, run by
  the code that runs `aot_eager`: the same kernels in the same number as remat's plain plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.backends.debugging import aot_eager as stock
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.models.behind import behind
from benchmarks.models.subject import Subject
from remat import _compat
from remat.capture.refused import logging_functions
from remat.training.step import TrainingStep

AMB = (0.8, 0.6, 0.4, 0.2, 0.0)

aten = torch.ops.aten
SAVED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


class Peer(nn.Module):
    """One way to train the subject's step.

    Args:
        owner: the module whose gradients and buffers a step leaves behind.
        call: runs the forward pass.
    """

    def __init__(self, owner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["owner"], self.__dict__["call"] = owner, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the subject returns."""
        return self.__dict__["call"](*args, **kwargs)


def peers(subject: Subject, step: TrainingStep) -> dict[str, Callable[[], Peer]]:
    """What makes each peer, by name, plain training first."""
    found: dict[str, Callable[[], Peer]] = {
        "plain": lambda: Peer(subject.model, subject.model),
        "aot_eager": lambda: compiled(subject, None),
        "each once": lambda: each_once(subject, step),
        "checkpoint": lambda: checkpointed(subject),
        "selective": lambda: checkpointed(subject, selective_contexts),
    }
    return found | {f"amb {setting}": partial(compiled, subject, setting) for setting in AMB}


def checkpointed(subject: Subject, context: Callable[[], Any] | None = None) -> Peer:
    """A copy of the model whose blocks are checkpointed, each by itself."""
    made = copy.deepcopy(subject.model)
    more: dict[str, Any] = {} if context is None else {"context_fn": context}
    for block in subject.block_modules(made):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    return Peer(made, made)


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Save what products, convolutions and attention return."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def compiled(subject: Subject, setting: float | None) -> Peer:
    """The model under torch.compile's eager backend, compiled at its first call at a setting of the memory budget."""

    def backend(module: Any, inputs: Any) -> Any:  # another function each time: Dynamo keeps one result a backend
        return stock(module, inputs)

    function = torch.compile(subject.model, backend=backend, fullgraph=True, dynamic=False)
    patches: dict[str, Any] = {} if setting is None else {"activation_memory_budget": setting}
    ignored = set(logging_functions(subject.model))  # transformers' logging would split the graph

    def call(*args: Any, **kwargs: Any) -> Any:
        if calls:
            return function(*args, **kwargs)
        calls.append(True)
        with functorch_config.patch(**patches), dynamo_config.patch(ignore_logging_functions=ignored):
            return function(*args, **kwargs)

    calls: list[bool] = []
    return Peer(subject.model, call)


def each_once(subject: Subject, step: TrainingStep) -> Peer:
    """The joint graph with nothing recomputed."""
    function = _compat.compile_joint(step.captured.descriptor, default_partition, boxed_nop, boxed_nop)
    return Peer(subject.model, behind(subject.model, lambda inputs: function(*inputs)))
