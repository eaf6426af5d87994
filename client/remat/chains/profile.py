"""What each stage of a chain costs in time and bytes: measured stage by stage, on the real input."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from remat_ir import Chain

from ..device import storage_bytes
from .saved_state import saved_state_bytes
from .shared import SharedParameters, shared_parameters
from .stage_profile import REPETITIONS, StageCost, Timing, stage_cost


class ProfiledChain(NamedTuple):
    """The chain, and the stages (from 1) that compute other bits without grad than with it: LSTM's kernels do."""

    chain: Chain
    needs_grad: frozenset[int]


def chain_of(
    stages: Sequence[nn.Module],
    x: torch.Tensor,
    *,
    link_bytes_per_s: int | None = None,
    host_bytes: int | None = None,
    repetitions: int = REPETITIONS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> ProfiledChain:
    """Rotor's chain of a list of stages: one stage at a time runs, forward and backward, on a copy of its module.

    Needs the memory of the largest stage and of all activations between stages. Neither parameters, buffers, gradients
    nor torch's generators change. Numbers of Python's and numpy's that the stages' code draws are not put back, since
    other threads draw from these generators, too. Gradients of parameters that several stages use are held until the
    last of these stages has run backward; they are charged from the first to the last of them. What the last stage
    gives is charged to the end, since the caller may hold it: the loss is best made the last stage. So are the random
    states and buffers that are noted for stages which may run again.

    Args:
        link_bytes_per_s, host_bytes: as in `Chain`.
        repetitions, clock: how often each stage is timed, and by what, in ns; the median counts.

    Raises:
        CaptureError: a stage that the executor cannot run.
    """
    shared = shared_parameters(stages)
    costs: list[StageCost] = []
    y = x
    for n, stage in enumerate(stages):
        needs = [n > 0 or x.requires_grad]
        last = n + 1 == len(stages)
        name, timing = f"stage {n + 1}", Timing(repetitions, clock)
        cost, y = stage_cost(stage, name, [y], needs, shared.of(n), last=last, timing=timing)
        costs.append(cost)
    noted = [saved_state_bytes(stage, x.device) for stage in stages]
    # a stage that runs again works on copies of what was noted
    charged = [sum(noted) + own + costs[-1].activation_bytes for own in noted]
    beside = [held + size for held, size in zip(waiting_bytes(costs, shared), charged, strict=True)]
    beside[-1] -= costs[-1].activation_bytes
    chain = Chain(
        forward_ns=tuple(cost.forward_ns for cost in costs),
        backward_ns=tuple(cost.backward_ns for cost in costs),
        forward_workspace_bytes=tuple(c.forward_workspace_bytes + b for c, b in zip(costs, beside, strict=True)),
        untaped_workspace_bytes=tuple(c.untaped_workspace_bytes + b for c, b in zip(costs, beside, strict=True)),
        backward_workspace_bytes=tuple(c.backward_workspace_bytes + b for c, b in zip(costs, beside, strict=True)),
        tape_bytes=tuple(cost.tape_bytes for cost in costs),
        activation_bytes=(storage_bytes(x), *(cost.activation_bytes for cost in costs)),
        gradient_bytes=(*(cost.gradient_bytes[0] for cost in costs), costs[-1].activation_bytes),
        link_bytes_per_s=link_bytes_per_s,
        host_bytes=host_bytes,
    )
    return ProfiledChain(chain, frozenset(n for n, cost in enumerate(costs, 1) if cost.needs_grad))


def waiting_bytes(costs: Sequence[StageCost], shared: SharedParameters) -> list[int]:
    """[stages] what gradients of shared parameters may take while each stage runs in the backward phase.

    Parts are added up in order from the last stage; each user but the one that runs may have left one.
    """
    waiting = [0] * len(costs)
    for parameter, users in shared.users.items():
        size = parameter.numel() * parameter.element_size()
        for n in range(min(users), max(users)):
            waiting[n] += size
        waiting[users[1]] += size  # the first two parts are added up out of place
    return waiting
