"""Every private name of torch that the client uses, behind one version gate and one self-test."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

OLDEST = (2, 11)
MARK = "remat: "
TRIED = ("2.13",)


def version() -> tuple[int, int]:
    """The torch found here, as (major, minor)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


if version() < OLDEST:
    raise ImportError(f"remat needs torch {OLDEST[0]}.{OLDEST[1]} or later, and {torch.__version__} is installed")

import torch._C._autograd as _autograd  # noqa: E402
import torch._C._profiler as _profiler  # noqa: E402
import torch._dynamo.config as _dynamo_config  # noqa: E402
import torch._functorch.config as _functorch_config  # noqa: E402
from torch._dispatch.python import no_python_dispatcher  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.functional_export import dynamo_graph_capture_for_export  # noqa: E402
from torch._functorch.aot_autograd import (  # noqa: E402
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)
from torch._guards import CompileContext, TracingContext, detect_fake_mode  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "SideEffects",
    "active_ddp",
    "aot_backend",
    "boxed",
    "compile_joint",
    "detect_fake_mode",
    "export_joint",
    "forward_outputs",
    "frame_number",
    "joint_graph",
    "lacking",
    "mark",
    "missing",
    "only_real_tensors",
    "raw_call",
    "recording",
    "split_by_ddp",
    "start_recording",
    "stop_marked_recording",
    "stop_recording",
    "storage_key",
    "strict_graph",
    "version",
]


class SideEffects(Exception):
    """The module's code changes Python state that lives on after the call; a graph would not."""


def lacking(
    wanted: Sequence[tuple[Callable[..., Any], tuple[str, ...]]], owned: Sequence[tuple[Any, str]]
) -> list[str]:
    """Which parameters of functions, and which attributes of their owners, this torch lacks."""
    found: list[str] = []
    for function, names in wanted:
        parameters = inspect.signature(function).parameters
        found.extend(f"{function.__name__}({name}=…)" for name in names if name not in parameters)
    found.extend(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in owned if not hasattr(owner, name))
    return found


def missing() -> list[str]:
    """What this torch lacks of what the client relies on: the self-test, run at import."""
    found = lacking(
        (
            (aot_export_joint_with_descriptors, ("stack", "mod", "args", "kwargs")),
            (aot_compile_joint_with_descriptors, ("jd", "partition_fn", "fw_compiler", "bw_compiler")),
            (dynamo_graph_capture_for_export, ("fn",)),
        ),
        (
            (_dynamo_config, "ignore_logging_functions"),
            (_dynamo_config, "automatic_dynamic_shapes"),
            (_functorch_config, "donated_buffer"),
        ),
    )
    recorder = ("_enable_profiler_legacy", "_disable_profiler_legacy")
    found.extend(f"torch._C._autograd.{name}" for name in recorder if not hasattr(_autograd, name))
    if not hasattr(torch.ops.aten.add.Tensor, "_op"):
        found.append("OpOverload._op")
    return found


_MISSING = missing()
if _MISSING:
    raise ImportError(f"torch {torch.__version__} lacks what remat relies on: {', '.join(_MISSING)}")


def strict_graph(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: frozenset[Callable[..., Any]]
) -> torch.nn.Module:
    """The module as one graph by Dynamo, its parameters under their own names; `ignored` are logging functions.

    Every size is captured as itself. Left to its own settings Dynamo takes a size that has changed for a symbol, which
    takes it twice as long, and the joint graph is of one size all the same.
    """
    settings: dict[str, Any] = {"ignore_logging_functions": set(ignored), "automatic_dynamic_shapes": False}
    with warnings.catch_warnings(record=True) as caught, _dynamo_config.patch(**settings):
        warnings.simplefilter("always")
        graph = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    for warning in caught:
        text = str(warning.message)
        if "side effects happened" in text:
            sources = [part for part in text[text.find("[") + 1 : text.rfind("]")].split(", ") if not _harmless(part)]
            if sources:
                raise SideEffects(", ".join(sources))
            continue
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return graph  # type: ignore[no-any-return]


def _harmless(source: str) -> bool:
    """State that the call itself puts back: transformers' collector of hidden states."""
    return "__import_transformers_dot_utils_dot_output_capturing" in source


def export_joint(stack: contextlib.ExitStack, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The joint forward-backward graph with descriptors; `stack` holds the tracing contexts."""
    return aot_export_joint_with_descriptors(stack, module, tuple(args), dict(kwargs))


def joint_graph(descriptor: Any) -> fx.GraphModule:
    """The graph of an exported joint."""
    return descriptor.graph_module  # type: ignore[no-any-return]


def forward_outputs(descriptor: Any) -> int:
    """How many of the joint graph's outputs the forward pass returns."""
    meta = descriptor._aot_state.fw_metadata
    return int(meta.num_mutated_inp_runtime_indices + meta.num_outputs + meta.num_intermediate_bases)


def compile_joint(
    descriptor: Any,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    forward: Any,
    backward: Any,
) -> Callable[..., Any]:
    """A function of (parameters, buffers, arguments) that runs the two graphs under AOTAutograd's own runtime."""
    # compiling empties the metadata that it is given, and one capture may be compiled for several plans
    descriptor, state = copy.copy(descriptor), copy.copy(descriptor._aot_state)
    state.fw_metadata = copy.copy(state.fw_metadata)
    state.fw_metadata.bw_donated_idxs = []  # None would be taken for some, and retain_graph=True be refused
    descriptor._aot_state = state
    descriptor._aot_graph_capture = copy.copy(descriptor._aot_graph_capture)
    inner = getattr(descriptor._aot_graph_capture, "maybe_subclass_meta", None)
    if inner is not None:
        descriptor._aot_graph_capture.maybe_subclass_meta = copy.copy(inner)
    with _functorch_config.patch(donated_buffer=False):
        return aot_compile_joint_with_descriptors(
            descriptor, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
        )


def aot_backend(partition: Callable[..., Any], compiler: Any) -> Callable[..., Any]:
    """A backend for torch.compile that partitions with `partition` and runs both graphs as `compiler` makes them."""
    made = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)

    def run(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with _functorch_config.patch(donated_buffer=False):
            return made(module, example_inputs)

    return run


def active_ddp() -> Any:
    """The DistributedDataParallel in whose forward pass this code runs, or None."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    return None if module is None else module.DistributedDataParallel._get_active_ddp_module()


def split_by_ddp() -> bool:
    """Whether Dynamo compiles a graph that DistributedDataParallel's optimizer has cut at its buckets."""
    context = TracingContext.try_get()
    return getattr(context, "ddp_optimizer_ctx", None) is not None


def frame_number() -> int | None:
    """Which frame of the user's code Dynamo is compiling: parts of a split model have different ones."""
    compiling = CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments in a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def raw_call(target: Any) -> Callable[..., Any]:
    """An operator's own entry, without the Python wrapper around it."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share exactly when one storage holds both."""
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def only_real_tensors() -> Iterator[None]:
    """No fake mode nor any other dispatch mode inside, and no dispatch through Python.

    AOTAutograd traces with Python's dispatcher on, which keeps the interpreter's lock through every kernel: a
    collective of gloo then waits for its workers, and they, to free a tensor, for that lock.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield


def recording() -> bool:
    """Whether a profiler, the caller's own perhaps, is at work in this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def start_recording() -> None:
    """Note all that this thread's CPU allocator does, until `stop_recording`: by the profiler without Kineto."""
    off = _profiler._ExperimentalConfig()
    config = _profiler.ProfilerConfig(_profiler.ProfilerState.CPU, False, True, False, False, False, off)
    _autograd._enable_profiler_legacy(config)


def stop_recording() -> list[int]:
    """Bytes allocated or (negative) freed on the CPU, in order."""
    return [event for event in stop_marked_recording() if isinstance(event, int)]


def stop_marked_recording() -> list[int | str]:
    """Bytes allocated or (negative) freed on the CPU and the marks set between them, in order."""
    threads = _autograd._disable_profiler_legacy()
    start = next(record for records in threads for record in records)
    found: list[tuple[float, int | str]] = []
    for records in threads:
        for record in records:
            kind = str(record.kind())
            if kind == "memory_alloc" and record.cpu_memory_usage():
                found.append((start.cpu_elapsed_us(record), record.cpu_memory_usage()))
            elif kind == "push" and record.name().startswith(MARK):
                found.append((start.cpu_elapsed_us(record), record.name()[len(MARK) :]))
    # one thread's records are in order; several are merged by time
    return [event for _, event in (sorted(found, key=lambda f: f[0]) if len(threads) > 1 else found)]


def mark(text: str) -> None:
    """Leave a mark among the events that are being recorded."""
    with torch.autograd.profiler.record_function(MARK + text):
        pass
