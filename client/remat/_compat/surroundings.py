"""Settings of torch and of this process that tracing depends on."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.config
import torch.backends.opt_einsum
from torch._decomp import global_decomposition_table

from .plain import Unreadable

__all__ = ["registered_with", "surroundings", "variables_of"]

_TORCHS_OWN = frozenset({"aten/_foreach_mm/CUDA", "aten/linalg_lu_solve.out/MPS"})


def surroundings(own: frozenset[str]) -> tuple[Any, ...]:
    """Settings of torch and of this process that tracing depends on.

    Args:
        own: the kernels that are put in place of torch's by whoever asks, as "aten/OPERATOR/KEY".

    Raises:
        Unreadable: there is something that no setting tells: modes that are on, other kernels in place of torch's.
    """
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    if modes or torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unreadable("modes of torch are on")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise Unreadable("saved tensors have hooks")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise Unreadable("the process is one of several ranks")
    kernels = frozenset(k for k in torch.library._impls if k.startswith(("aten/", "prim")))
    placed = sorted(k for k in kernels if k.startswith("aten/") and not k.endswith("/Meta") and k not in _TORCHS_OWN)
    if not own.issuperset(placed):
        raise Unreadable(f"{placed[0]} is not torch's")
    other = _not_torchs()
    if other:
        raise Unreadable(f"{other} is not torch's")
    backends: Any = torch.backends
    flags: tuple[Any, ...] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.is_anomaly_enabled(),
        torch.is_autocast_cache_enabled(),
        sys.getrecursionlimit(),
        torch.__future__.get_overwrite_module_params_on_conversion(),
    )
    numerics: tuple[Any, ...] = (
        backends.mkldnn.enabled,
        (backends.opt_einsum.enabled, backends.opt_einsum.strategy),
        torch._C._get_nnpack_enabled() if hasattr(torch._C, "_get_nnpack_enabled") else None,
    )
    configs = (torch._dynamo.config, torch._functorch.config, torch.fx.experimental._config)
    chosen = [
        (name, sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value).partition(" at 0x")[0])
        for config in configs
        for name, value in sorted(config.get_serializable_config_copy().items())
    ]
    versions = (torch.__version__, torch.version.git_version, sys.version, platform.machine())
    more = (torch.backends.cpu.get_cpu_capability(), sorted(kernels))
    return versions, flags, numerics, chosen, more


def _not_torchs() -> str:
    """An operator that Python code outside of torch traces in place of torch's; empty without one."""
    made = [(o, f) for o in _overloads() for f in o.py_kernels.values()]
    made += [(o, f) for table in global_decomposition_table.values() for o, f in table.items()]
    outside = (o for o, f in made if str(getattr(f, "__module__", "torch")).partition(".")[0] not in ("torch", "remat"))
    return str(next(outside, ""))


def _overloads() -> Iterator[Any]:
    """The operators of torch that something in this process has asked for."""
    for namespace in (torch.ops.aten, torch.ops.prims):
        for packet in list(vars(namespace).values()):
            if isinstance(packet, torch._ops.OpOverloadPacket):
                yield from (o for o in list(vars(packet).values()) if isinstance(o, torch._ops.OpOverload))


def registered_with(kind: type) -> list[type]:
    """The classes that an abstract class was told are its subclasses."""
    return [found for found in (held() for held in _abc._get_dump(kind)[0]) if found is not None]


def variables_of(environment: Any) -> Mapping[Any, Any]:
    """What an environment such as `os.environ` keeps its variables in, and tracing reads them from."""
    found: Mapping[Any, Any] = environment._data
    return found
