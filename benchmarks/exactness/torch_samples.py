"""The samples of torch's own test databases: every module, and differentiable operators."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .compare import Function, Sample, tensors

MODULE_SAMPLES = 6
"""Of each module, spread over all that torch has for it."""

OPERATOR_SAMPLES = 1
"""Of each operator."""


def databases() -> tuple[list[Any], list[Any]]:
    """`module_db` and `op_db`, which torch ships for its own tests."""
    # these import expecttest for a base class of tests, which nothing here runs
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return list(module_db), list(op_db)


def module_samples(most: int = MODULE_SAMPLES) -> Iterator[Sample]:
    """Inputs of all modules, at most so many of each, in train mode."""
    for info in databases()[0]:
        name = info.module_cls.__name__
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
        inputs = [found for found in inputs if found.forward_input is not None]
        chosen = sorted({round(i * (len(inputs) - 1) / max(1, most - 1)) for i in range(most)}) if inputs else []
        for index in chosen:
            yield Sample(name, partial(_module, info.module_cls, inputs[index]))


def _module(cls: type[nn.Module], found: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    made = cls(*found.constructor_input.args, **found.constructor_input.kwargs)
    made.train()
    return made, leaves(tuple(found.forward_input.args)), leaves(dict(found.forward_input.kwargs))


def operator_samples() -> Iterator[Sample]:
    """The first samples of every operator that has a gradient in float32."""
    for info in databases()[1]:
        if not info.supports_autograd or torch.float32 not in info.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                inputs = info.sample_inputs("cpu", torch.float32, requires_grad=True)
                wanted = [s for _, s in zip(range(8), inputs, strict=False) if _usable(s)][:OPERATOR_SAMPLES]
            except Exception:  # a sample that needs a library which is not here
                continue
        name = f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}"
        for found in wanted:
            yield Sample(name, partial(_operator, info.op, found))


def _usable(found: Any) -> bool:
    first = next(tensors(found.input), None)
    return first is not None and first.dtype.is_floating_point and first.numel() > 0


def _operator(function: Any, found: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Function(function), leaves((found.input, *found.args)), leaves(dict(found.kwargs))


def leaves(thing: Any) -> Any:
    """The same with tensors that no graph leads to: each sample is trained several times."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone().requires_grad_(thing.requires_grad)
    if isinstance(thing, dict):
        return {name: leaves(value) for name, value in thing.items()}
    return type(thing)(map(leaves, thing)) if type(thing) in (tuple, list) else thing
