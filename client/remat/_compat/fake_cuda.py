"""Fake tensors of a CUDA device where there is none: autograd asks C++ for the device's guard and hooks.

Torch has a guard for this of its own, which does nothing, and puts it in place of one that counts no device. So one
that counts none is registered: an object whose functions all return 0. Of the hooks, two are answered here: that the
backend is built, and that no context exists. The hooks are as before when the block ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from .versions import lacking, library, require

require(
    lacking(
        ((torch.autocast, ("device_type", "dtype", "enabled", "cache_enabled")),),
        (
            (torch._C, "_ensureCUDADeviceGuardSet"),
            (torch._C, "_accelerator_getAccelerator"),
            (torch.autocast("cpu", enabled=False), "_enabled"),
        ),
    )
)

FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_ATTENTION: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
COMPOSITE_ATTENTION: Any = torch.ops.aten._scaled_dot_product_attention_math.default

_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_CUDA = 1
"""c10::DeviceType::CUDA."""

_IS_BUILT, _HAS_CONTEXT = 2, 4
"""Places in the table of at::CUDAHooksInterface, after two destructors (ATen/detail/AcceleratorHooksInterface.h)."""

_SLOTS = 64
_LOCK = threading.RLock()
_kept: list[Any] = []
"""What C++ refers to."""


@contextlib.contextmanager
def fake_cuda(device: torch.device) -> Iterator[None]:
    """Inside, fake tensors of a CUDA device can be differentiated on a machine without one.

    Raises:
        NotImplementedError: this build of torch does not offer what is needed.
    """
    with _LOCK:
        try:
            _set_guard()
            restore = _answer_hooks()
        except (OSError, AttributeError) as error:
            raise NotImplementedError(f"this build of torch has no way to trace for a CUDA device: {error}") from error
        try:
            # without threads of its own for each device: autograd counts devices once, at the first backward pass
            with torch.autograd.set_multithreading_enabled(False):
                _self_test(device)
                yield
        finally:
            restore()


@contextlib.contextmanager
def replaced(operator: str, keys: Sequence[str], function: Callable[..., Any]) -> Iterator[None]:
    """Inside, an operator of ATen is a Python function for the dispatch keys given."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for key in keys:
            library.impl(operator, function, key)
        yield
    finally:
        del library  # the last reference: what it has registered goes with it


@contextlib.contextmanager
def autocast_on(kind: str) -> Iterator[None]:
    """Inside, `torch.autocast` for a kind of device casts as it does there; else it is off where none is here."""
    changed: Any = torch.autocast
    before = changed.__init__

    @functools.wraps(before)
    def made(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        before(self, device_type, dtype, enabled if device_type != kind else False, cache_enabled)
        if device_type == kind:
            self._enabled = enabled

    changed.__init__ = made
    try:
        yield
    finally:
        changed.__init__ = before


class OnMeta(TorchFunctionMode):
    """Tensors are made on the meta device, whatever accelerator is asked for; what asks for the CPU is made there.

    Args:
        kinds: of accelerators, which are names of methods of a tensor, too.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self._moves = frozenset(getattr(torch.Tensor, kind) for kind in kinds if hasattr(torch.Tensor, kind))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            if torch.device(kwargs.get("device") or "meta").type != "cpu":
                kwargs["device"] = "meta"
                kwargs.pop("pin_memory", None)
                if kwargs.get("generator") is not None:
                    del kwargs["generator"]
        elif func in self._moves:
            return args[0].to("meta")
        elif func is torch.Tensor.to:
            args = tuple(_meta_for(value) for value in args)
            kwargs = {name: _meta_for(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _meta_for(value: Any) -> Any:
    """The meta device in place of any device but the CPU; anything else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "meta"
    if isinstance(value, str):
        value = torch.device(value)
    return torch.device("meta") if isinstance(value, torch.device) and value.type != "cpu" else value


def _set_guard() -> None:
    if _kept:
        return
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 0)
    table = (ctypes.c_void_p * _SLOTS)(*[ctypes.cast(function, ctypes.c_void_p).value] * _SLOTS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # else torch has one
        register = getattr(library("c10"), _REGISTER)
        register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
        register(_CUDA, ctypes.addressof(guard))
    torch._C._ensureCUDADeviceGuardSet()
    _kept.append((function, table, guard))


def _answer_hooks() -> Any:
    """Answer the two hooks; returns what undoes that."""
    hooks = getattr(library("torch_cpu"), _HOOKS)
    hooks.restype = ctypes.c_void_p
    place = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))
    before = place[0]
    own = ctypes.cast(before, ctypes.POINTER(ctypes.c_void_p))
    built = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    context = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: False)
    # the two words before the first function are the offset and the type
    table = (ctypes.c_void_p * (_SLOTS + 2))(*(own[i - 2] for i in range(_SLOTS + 2)))
    table[_IS_BUILT + 2] = ctypes.cast(built, ctypes.c_void_p).value
    table[_HAS_CONTEXT + 2] = ctypes.cast(context, ctypes.c_void_p).value
    _kept.append((built, context, table))
    place[0] = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)

    def restore() -> None:
        place[0] = before

    return restore


def _self_test(device: torch.device) -> None:
    """See that a gradient comes out.

    Raises:
        NotImplementedError: it does not.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = FakeTensor(mode, torch.empty(2, 2, device="meta"), device).requires_grad_()
            (found,) = torch.autograd.grad((x @ x).sum(), x)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise NotImplementedError(f"this build of torch has no way to trace for a CUDA device: {why}") from error
    if found.device != device:
        raise NotImplementedError(f"this build of torch traces for a CUDA device as for {found.device.type}")
