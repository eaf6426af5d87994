"""What autograd does with a gradient when it stores it as an input's: takes it as it is, or copies it."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 60
"""Rows and columns of the block by which the CPU copies a transposed matrix (aten/src/ATen/native/Copy.cpp)."""


def same_layout(gradient: torch.Tensor, variable: Any) -> bool:
    """AccumulateGrad's layout contract (torch/csrc/autograd/utils/grad_layout_contract.h)."""
    if not isinstance(variable, torch.Tensor):  # a process group that the graph takes as an input
        return True
    if torch.ops.aten.is_non_overlapping_and_dense.default(variable):
        return all(
            size == 1 or mine == theirs
            for size, mine, theirs in zip(gradient.shape, gradient.stride(), variable.stride(), strict=True)
        )
    return gradient.is_contiguous()


def copying_bytes(gradient: torch.Tensor, variable: torch.Tensor) -> int:
    """The bytes that a copy into the layout of an input takes while it runs.

    A CPU copies the transpose of a contiguous matrix by way of a block, if the matrix is at least as large as one.
    """
    transposed = gradient.dim() == 2 and gradient.stride() == (1, gradient.shape[0]) and variable.is_contiguous()
    by_blocks = gradient.device.type == "cpu" and transposed and gradient.numel() >= BLOCK**2
    return BLOCK**2 * gradient.element_size() if by_blocks else 0
