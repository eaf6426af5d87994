"""Where `remat.tag` runs inside of other stacks: passes over their graphs, and a partitioner for Inductor."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Unpack
from uuid import uuid4

from torch import fx

from remat_ir import Link

from .. import _compat
from .._compat import tags as torch_tags
from ..capture.refused import refuse_split_by_ddp
from ..distributed import planner_of
from ..errors import CaptureError
from ..planning.budget import Budget, read_budget
from ..planning.options import SolveOptions, solve_options
from ..planning.planner import Planner
from .tag import TagFields, Tagged, tagged

MOST_KNOWN = 64
"""Graphs that are remembered."""


class HostFields(TagFields, total=False):
    """The fields of `SolveOptions` that concern a traced step whose trainer moves values to the host."""

    link: str | Link | None
    host_bytes: int | str | None


class _Tags:
    """A budget for one graph of Dynamo's, who plans it, and what was tagged."""

    _takes: type[TagFields] = TagFields

    def __init__(
        self,
        budget: Budget,
        planner: Planner | str | None = None,
        options: SolveOptions | None = None,
        **fields: Unpack[HostFields],
    ) -> None:
        self._budget = read_budget(budget)
        self._asking = solve_options(type(self), self._takes, options, fields)
        self._planner = planner_of(planner, self._asking)
        # an object's address would be another one in each process; any planner keeps to the budget
        named = planner if planner is None or isinstance(planner, str) else type(planner).__qualname__
        # ranks must plan in step: one that found code in a cache would leave those without it waiting
        own = uuid4().hex if self._planner.coordinator.in_step else None
        self.key = json.dumps((version("remat"), repr(self._budget), named, repr(self._asking), own))
        self.tagged: list[Tagged] = []
        self.peaks: list[int] = []
        self._frame: int | None = None

    def _tag(self, module: fx.GraphModule, forward_outputs: int | None) -> Tagged:
        """Tag a graph of the one frame that the budget is for.

        Raises:
            CaptureError: it is a part of a step of several graphs; or as `remat.tag`.
        """
        refuse_split_by_ddp()
        frame = _compat.frame_number()
        if self.tagged and frame != self._frame:
            raise CaptureError(
                "the step has a second graph, and the budget was given to the first one: torch.compile has split the "
                "model, or two models share this object; use fullgraph=True and an object a model, or "
                "remat.enable(budget=…), which divides a budget"
            )
        self._frame = frame
        found = tagged(module, self._budget, self._planner, self._asking, forward_outputs)
        self.tagged.append(found)
        del self.tagged[:-MOST_KNOWN]
        return found

    def _check(self, found: Tagged, backward: fx.GraphModule) -> None:
        """Compare torch's own partition with what was planned."""
        self.peaks.append(found.checked(backward))
        del self.peaks[:-MOST_KNOWN]


class TagPass(_Tags):
    """A pass `(graph, example inputs) -> graph` that tags a joint graph within a budget: see `remat.tag`.

    For `torch._functorch.config.joint_custom_pass`, with `torch.compile(backend="aot_eager")`, and for compilers that
    run passes of this form on joint graphs. AOTAutograd's cache does not know of the pass: with it on, a second budget
    would run by the first one's code, so the pass refuses. Under Inductor use `TagPartitioner`.

    Args:
        budget: of the whole step, as for `remat.optimize`. A step of several graphs is refused.
        planner: as for `remat.optimize`.
        options, fields: as for `remat.tag`.

    Attributes:
        tagged: what was tagged lately, in order.
        peaks: the peak in bytes of torch's own partition of each of them.

    Example:
        >>> import torch, torch._functorch.config as functorch
        >>> parts = [part for _ in range(6) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        >>> model = torch.nn.Sequential(*parts)
        >>> tags = TagPass("75%", planner="greedy")
        >>> with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False):
        ...     torch.compile(model, backend="aot_eager", dynamic=False)(torch.ones(512, 64)).sum().backward()
        >>> tags.peaks == [tags.tagged[0].peak_bytes]
        True

    Raises:
        InvalidData: not a budget, a planner or an option.
        CaptureError: in a compilation, AOTAutograd's cache is on, or the graph cannot be planned.
        BudgetTooSmall, NothingFound: in a compilation, no plan that torch can carry out fits.
    """

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any] = (), **unused: Any) -> fx.GraphModule:
        """The same graph, its nodes tagged; torch's partition of a copy is checked against the plan."""
        if torch_tags.cache_is_on():
            raise CaptureError(
                "AOTAutograd's cache does not know of this pass, so that another budget would run by this one's code: "
                "set torch._functorch.config.enable_autograd_cache = False, or use TagPartitioner under Inductor"
            )
        found = self._tag(gm, None)
        outputs = torch_tags.forward_results(gm.graph)
        trial = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        _, backward = torch_tags.partition(trial, example_inputs, num_fwd_outputs=outputs)
        self._check(found, backward)
        return gm


class TagPartitioner(_Tags, torch_tags.Partitioner):
    """What `torch._inductor.config.custom_partitioner_fn` may be set to: torch's own partition, tagged within a budget.

    The graph is the one that Inductor has decomposed, and the plan is made for its kernels as they are: Inductor fuses
    them afterwards, so that a step mostly needs less than planned. `uuid()` has the budget, the options and the
    version, so that caches of compiled code tell two budgets apart. With `ranks=` it is another one in each job: a
    rank that found its code in a cache would leave the others waiting.

    Args:
        budget, planner, options, fields: as for `TagPass`.

    Attributes:
        tagged: what was tagged lately, in order; nothing of what came from a cache.
        peaks: the peak in bytes of torch's own partition of each of them, its kernels as they are.

    Example:
        >>> import torch._inductor.config as inductor
        >>> with inductor.patch(custom_partitioner_fn=TagPartitioner("70%", planner="greedy")):
        ...     pass  # torch.compile(model)(batch).backward() here

    Raises:
        As `TagPass`, whatever caches are on.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **given: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph of a joint graph that is tagged first."""
        found = self._tag(gm, given["num_fwd_outputs"])
        forward, backward = torch_tags.partition(gm, joint_inputs, **given)
        self._check(found, backward)
        return forward, backward


class GraphTrainerPass(_Tags):
    """A pass of torchtitan's graph trainer, `(graph, example inputs, config=) -> graph`, that tags the traced step.

    It takes the place of `tag_with_memory_policy_pass`; `selective_activation_remat_pass` carries the tags out. That
    pass cannot run random operators again, and runs nothing again for the head and the loss: all these are saved.
    Enter it by `register_memory_policy("remat")(tags)` and `--compile.memory_policy remat`.

    With `link=`, what a plan has on the host between the passes is tagged for `apply_cpu_offload_pass` of the trainer,
    by its defaults (`cpu_offload_prefetch_n_layers` and `cpu_offload_defer_n_layers` of 1). The promised peak is that
    of its copies; how long they take is for the link and the trainer to say.

    Args:
        budget, planner, options, fields: as for `TagPass`; `link` by its name, and `host_bytes`, as for
            `remat.optimize`.

    Attributes:
        tagged: the one step that was tagged, in a list.

    Example:
        >>> tags = GraphTrainerPass("60%", planner="greedy")  # register_memory_policy("remat")(tags)

    Raises:
        InvalidData: not a budget, a planner or an option.
        CaptureError: in a call, it is a second graph, such as a pipeline's second stage; or the graph is no step of
            loss and gradients, or its backward pass is in parts, as with a loss by chunks.
        BudgetTooSmall, NothingFound: in a call, no plan that the trainer can carry out fits.
    """

    _takes = HostFields

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None, **unused: Any
    ) -> fx.GraphModule:
        """The same graph, its forward nodes tagged."""
        if self.tagged:
            raise CaptureError(
                "the budget was given to one graph already: a step of several graphs is not divided here"
            )
        self.tagged.append(tagged(gm, self._budget, self._planner, self._asking, whole_step=True))
        return gm
