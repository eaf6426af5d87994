"""Operators by which a graph tells Inductor what to write to memory, and in which layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .parts import ExternKernel, FlexibleLayout, get_stride_order, lowerings, register_lowering, replaced

force_stride_order: Any = torch.ops.prims.inductor_force_stride_order.default
"""Stores a tensor in an order of strides, which is then that of its value, too."""

materialized_copy: Any = torch.ops.aten.lift_fresh_copy.default
"""A copy that Inductor's removal of what does nothing leaves alone, unlike `clone`; lowered as one."""


_library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("stored(Tensor x, int[] strides) -> Tensor")
_library.impl("stored", lambda x, strides: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("remat::stored", lambda x, strides: torch.empty_like(x), lib=_library)
stored: Any = torch.ops.remat.stored.default
"""Stores a tensor in an order of strides, of which its value says nothing: Inductor's own choices change none, either,
and views of the value stay what they are."""


@register_lowering(stored, type_promotion_kind=None)
def _lower_stored(x: Any, strides: Sequence[int]) -> Any:
    return ExternKernel.require_stride_order(x, get_stride_order(strides))


_library.define("channels_last_cat(Tensor[] tensors, int dim=0) -> Tensor")
_library.impl("channels_last_cat", lambda tensors, dim=0: torch.cat(tensors, dim), "CompositeExplicitAutograd")
torch.library.register_fake("remat::channels_last_cat", lambda tensors, dim=0: torch.cat(tensors, dim), lib=_library)
channels_last_cat: Any = torch.ops.remat.channels_last_cat.default
"""Tensors side by side in channels last. Inductor fixes the layout of a `cat` when it lowers it: by what it reads, if
that is in memory already, else by the metadata. What is stored in another one later is a copy of it all."""


@register_lowering(channels_last_cat, type_promotion_kind=None)
def _lower_cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    usual = FlexibleLayout.contiguous_strides

    def channels_last(sizes: Sequence[Any]) -> Any:
        return FlexibleLayout.stride_ordered(sizes, (3, 0, 2, 1)) if len(sizes) == 4 else usual(sizes)

    with replaced(FlexibleLayout, "contiguous_strides", staticmethod(channels_last)):
        return lowerings[torch.ops.aten.cat.default](list(tensors), dim)
