"""The numbers that a step computes with: a dtype for the model and its inputs, or autocast around the step."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from remat_ir import InvalidData

from ..device import NAMED

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def dtype_of(text: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        InvalidData: there is none of that name to train in.
    """
    if text not in DTYPES:
        raise InvalidData(f"a step computes in one of {', '.join(DTYPES)}, not in {text!r}")
    return DTYPES[text]


def in_dtype(make_model: Callable[..., Any], dtype: str | None) -> Callable[..., Any]:
    """A function that makes the same model and call in a dtype; None: as they are.

    Raises:
        InvalidData: there is no such dtype.
    """
    if dtype is None:
        return make_model
    kind = dtype_of(dtype)

    @functools.wraps(make_model)
    def made(*args: Any, **kwargs: Any) -> Any:
        found = make_model(*args, **kwargs)
        if not isinstance(found, (tuple, list)) or not isinstance(found[0], torch.nn.Module):
            return found  # `build` says what is wrong with it
        return found[0].to(kind), *(_cast(value, kind) for value in found[1:])

    made.__signature__ = inspect.signature(make_model)  # type: ignore[attr-defined]
    return made


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value) if type(value) in (tuple, list) else value


@contextlib.contextmanager
def autocast(dtype: str | None) -> Iterator[None]:
    """Inside, a step is captured as under `torch.autocast` on a named device, which need not be here; None: as it is.

    Raises:
        InvalidData: there is no such dtype.
    """
    if dtype is None:
        yield
        return
    kind, place = dtype_of(dtype), NAMED.type
    before = torch.is_autocast_enabled(place), torch.get_autocast_dtype(place)
    # torch.autocast would do nothing, with a warning, where this machine has no such device
    torch.set_autocast_enabled(place, True)
    torch.set_autocast_dtype(place, kind)
    try:
        yield
    finally:
        torch.set_autocast_enabled(place, before[0])
        torch.set_autocast_dtype(place, before[1])
        torch.clear_autocast_cache()
