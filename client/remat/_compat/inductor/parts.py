"""The parts of Inductor that plans under it rely on, and the self-test that they are there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..versions import lacking, require, required

with required("a plan under Inductor"):
    import torch._functorch.config as functorch_config
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._functorch._aot_autograd.graph_compile import collect_bw_donated_buffer_idxs
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor import inductor_prims as _prims  # noqa: F401  defines torch.ops.prims.inductor_*
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen import wrapper
    from torch._inductor.codegen.common import WorkspaceArg
    from torch._inductor.custom_graph_pass import CustomKnapsackSolver, CustomPartitionerFn
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.fusion_regions import is_fusible_node
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import ComputedBuffer, ExternKernel, FixedLayout, FlexibleLayout, get_stride_order
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.utils import get_dtype_size
    from torch._inductor.virtualized import V


__all__ = [
    "AOTAutogradCache",
    "ComputedBuffer",
    "CustomKnapsackSolver",
    "CustomPartitionerFn",
    "DebugContext",
    "ExternKernel",
    "FixedLayout",
    "FlexibleLayout",
    "GraphLowering",
    "InductorChoices",
    "TracingContext",
    "V",
    "WorkspaceArg",
    "collect_bw_donated_buffer_idxs",
    "compile_fx",
    "config",
    "functorch_config",
    "get_dtype_size",
    "get_stride_order",
    "is_fusible_node",
    "lowerings",
    "min_cut_rematerialization_partition",
    "register_lowering",
    "replaced",
    "tracing",
    "wrapper",
]


_LINES = (
    "AllocateLine",
    "FreeIfNotReusedLine",
    "FreeLine",
    "ReuseLine",
    "ReinterpretLine",
    "ExternKernelAllocLine",
    "ExternKernelOutLine",
    "MultiOutputLine",
)

require(
    lacking(
        (
            (compile_fx.compile_fx, ("model_", "example_inputs_", "inner_compile", "config_patches")),
            (compile_fx.compile_fx_forward, ("gm", "num_orig_model_outputs", "compiler_config_extra", "inner_compile")),
            (compile_fx.compile_fx_backward, ("gm", "compiler_config_extra", "inner_compile")),
            (compile_fx._InProcessFxCompile.codegen_and_compile, ("gm", "inputs_to_check", "graph_kwargs")),
            (AOTAutogradCache.save, ("key", "entry")),
            (collect_bw_donated_buffer_idxs, ("fw_module", "bw_module", "fw_metadata")),
            (InductorChoices.can_fuse_horizontal, ("scheduler", "node1", "node2")),
            (InductorChoices.can_fuse_vertical, ("scheduler", "node1", "node2")),
        ),
        (
            (config, "custom_partitioner_fn"),
            (config, "inductor_choices_class"),
            (V, "set_choices_handler"),
            (functorch_config, "force_non_lazy_backward_lowering"),
            (functorch_config, "enable_autograd_cache"),
            (GraphLowering, "compile_to_module"),
            (GraphLowering, "codegen"),
            (FlexibleLayout, "contiguous_strides"),
            *((wrapper, name) for name in _LINES),
        ),
    ),
    "the part for plans under Inductor",
)


@contextlib.contextmanager
def replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    """Inside, a class has another attribute: for what Inductor has no setting for."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
