"""What each kernel of a captured step costs: measured once for each signature, on inputs made from its metadata."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .. import _compat
from ..capture.dataflow import tensors
from ..capture.operations import Measured
from ..errors import CaptureError
from .measure import Window
from .timing import VERSION, times


class Table(Protocol):
    """Where measured kernels are shared: see `remat.planning.profiles`."""

    def get(self, device: str, signatures: Sequence[str]) -> Mapping[str, Any]: ...

    def put(self, device: str, profiles: Mapping[str, Any]) -> Mapping[str, Any]: ...


class Profiled(NamedTuple):
    """The cost of each kernel; how many signatures there were, and how many of them came from the shared table."""

    kernels: Mapping[fx.Node, Measured]
    signatures: int
    shared: int
    seconds: float


def profile_kernels(kernels: Iterable[fx.Node], table: Table | None = None) -> Profiled:
    """Cost in ns and workspace in bytes of each kernel, each signature looked up first and measured if unknown.

    Needs the memory of the largest single kernel, not that of the step. Generators' states are left as they were.
    """
    start = time.perf_counter()
    by_signature: dict[str, fx.Node] = {}
    signature_of: dict[fx.Node, str] = {}
    for node in kernels:
        signature_of[node] = signature(node)
        by_signature.setdefault(signature_of[node], node)
    device = device_kind(by_signature.values())
    known: dict[str, Measured] = {}
    if table is not None:
        found = table.get(device, sorted(by_signature))
        known = {s: Measured(int(m[0]), int(m[1])) for s, m in found.items() if s in by_signature}
    shared = len(known)
    fresh = _measure({s: n for s, n in by_signature.items() if s not in known})
    if table is not None and fresh:
        stands = table.put(device, fresh)
        fresh = {s: Measured(int(stands[s][0]), int(stands[s][1])) if s in stands else m for s, m in fresh.items()}
    known |= fresh
    return Profiled(
        {n: known[s] for n, s in signature_of.items()}, len(by_signature), shared, time.perf_counter() - start
    )


def signature(node: fx.Node) -> str:
    """A hash of all that a kernel's cost depends on: operator, shapes, strides, dtypes, constants."""
    text = json.dumps([str(node.target), _describe(node.args), _describe(node.kwargs)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def device_kind(nodes: Iterable[fx.Node]) -> str:
    """The device kind, library version, thread count and way of timing under which costs are shared."""
    kind = "cpu"
    for node in nodes:
        for tensor in tensors(node.meta.get("val")):
            kind = tensor.device.type if tensor.device.type != "cpu" else kind
    if kind == "cuda":
        return (
            f"cuda {torch.cuda.get_device_name()} torch {torch.__version__} cuda {torch.version.cuda} timing {VERSION}"
        )
    name = _cpu_name() if kind == "cpu" else kind
    return f"{kind} {name} torch {torch.__version__} threads {torch.get_num_threads()} timing {VERSION}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.machine()


def _describe(thing: Any) -> Any:
    if isinstance(thing, fx.Node):
        value = thing.meta.get("val")
        return [_describe_tensor(t) for t in tensors(value)] or str(value)
    if isinstance(thing, (list, tuple)):
        return [_describe(item) for item in thing]
    if isinstance(thing, Mapping):
        return {str(key): _describe(value) for key, value in sorted(thing.items())}
    return repr(thing)


def _describe_tensor(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), tensor.device.type]


def _measure(nodes: Mapping[str, fx.Node]) -> dict[str, Measured]:
    if not nodes:
        return {}
    if _compat.recording():  # the caller's profiler: another thread has none
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(_measure, nodes).result()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
    try:
        with _compat.only_real_tensors(), torch.no_grad():
            spaces = _workspaces(nodes)
            took = times({s: partial(_call, n) for s, n in nodes.items()}, frozenset(_on_cuda(nodes)))
            return {s: Measured(took[s], spaces[s]) for s in sorted(nodes)}
    finally:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state_all(states[1:])


def _call(node: fx.Node) -> Callable[[], Any]:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), materialize)
    target = _compat.raw_call(node.target)
    return lambda: target(*args, **kwargs)


def materialize(node: fx.Node) -> Any:
    """A real value with the metadata of a node."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target))
    return _like(value, _highest_index(node)) if isinstance(value, torch.Tensor) else value


def _like(fake: torch.Tensor, highest: int) -> torch.Tensor:
    """A real tensor of the same strided extent; integers are valid indices, spread out where the bound is known."""
    shape, stride = [int(s) for s in fake.shape], [int(s) for s in fake.stride()]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    real = torch.empty(extent, dtype=fake.dtype, device=fake.device)
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        if fake.dtype.itemsize >= 2:
            real.uniform_()  # where probabilities, variances and logarithms' arguments all lie
        else:
            real.zero_()
    elif fake.dtype == torch.bool:
        real.fill_(True)
    elif highest > 0 and fake.dtype in (torch.int64, torch.int32):
        real.random_(0, highest)
    else:
        real.zero_()
    return real.as_strided(shape, stride)


def _highest_index(node: fx.Node) -> int:
    """A bound below which an integer input is a valid index for all embeddings that read it, or 0."""
    bounds = []
    for user in node.users:
        name = str(user.target)
        if name.startswith("aten.embedding.default") and user.args[1] is node:
            bounds.append(int(user.args[0].meta["val"].shape[0]))  # type: ignore[union-attr]
        elif name.startswith("aten.embedding_dense_backward") and user.args[1] is node:
            bounds.append(int(str(user.args[2])))
        else:
            return 0
    return min(bounds, default=0)


def _workspaces(nodes: Mapping[str, fx.Node]) -> dict[str, int]:
    """Bytes that live only while each kernel runs, from the allocator's own events."""
    cuda = _on_cuda(nodes)
    found = {s: _workspace_cuda(n) for s, n in sorted(cuda.items())}
    rest = [(s, n) for s, n in sorted(nodes.items()) if s not in cuda]
    for _, node in rest:
        _first_call(node)
    for text, node in rest:
        call, window = _call(node), Window()
        window.open()
        try:
            kept = call()
        finally:
            peak = window.close()
        found[text] = max(0, peak.peak_bytes - peak.left_bytes)
        del kept, call
    return found


def _first_call(node: fx.Node) -> None:
    """Run a kernel once: first calls may allocate what later ones reuse.

    Raises:
        CaptureError: it does not run on made-up numbers, so nothing is known about it.
    """
    try:
        _call(node)()
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise CaptureError(f"{node.name} ({node.target}) cannot be measured on made-up inputs: {why}") from error


def _on_cuda(nodes: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
    return {s: n for s, n in nodes.items() if any(t.device.type == "cuda" for t in tensors(n.meta.get("val")))}


def _workspace_cuda(node: fx.Node) -> int:
    _first_call(node)
    call = _call(node)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    after, worst = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del kept
    return max(0, worst - max(before, after))
