"""What each kernel of a captured step costs: measured once for each signature, on inputs made from its metadata."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .. import _compat, generators
from ..capture.dataflow import tensors
from ..capture.operations import Measured
from ..device import Device, of
from ..errors import CaptureError
from .collectives import modelled_collective
from .fitted import Costs, fitted_cost, same_kernels
from .measure import Window
from .timing import VERSION, rounded, times


class Table(Protocol):
    """Where measured kernels are shared: see `remat.planning.profiles`."""

    def get(self, device: str, signatures: Sequence[str]) -> Mapping[str, Any]: ...

    def put(self, device: str, profiles: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def derived(self, profiles: Mapping[str, Any]) -> Mapping[str, Any]: ...


class Profiled(NamedTuple):
    """The cost of each kernel, and where it is from.

    Attributes:
        signatures, shared: how many kinds of kernels there were, and how many of them came from the shared table.
        fitted: those whose time was not measured but follows from two other sizes.
    """

    kernels: Mapping[fx.Node, Measured]
    signatures: int
    shared: int
    seconds: float
    fitted: frozenset[fx.Node] = frozenset()

    @property
    def costs(self) -> Costs:
        """The measured costs of all kernels, if the fitted ones are left out."""
        return {n: m.cost_ns for n, m in self.kernels.items() if n not in self.fitted}


def profile_kernels(kernels: Iterable[fx.Node], table: Table | None = None, sizes: Sequence[Profiled] = ()) -> Profiled:
    """Cost in ns and workspace in bytes of each kernel, each signature looked up first and measured if unknown.

    A collective is never launched: its cost is modelled (`modelled_collective`), whatever a table says.

    Needs the memory of the largest single kernel, not that of the step. Generators' states are left as they were.

    Args:
        sizes: the same step at other sizes. A kernel between two of them is not timed; its workspace is measured all
            the same, since budgets depend on it. What is not measured is not shared.
    """
    start = time.perf_counter()
    kernels = list(kernels)
    by_signature: dict[str, fx.Node] = {}
    signature_of: dict[fx.Node, str] = {}
    for node in kernels:
        signature_of[node] = signature(node)
        by_signature.setdefault(signature_of[node], node)
    device = device_kind(by_signature.values())
    known = {s: modelled_collective(n) for s, n in by_signature.items() if _compat.is_collective(n.target)}
    by_signature = {s: n for s, n in by_signature.items() if s not in known}
    if table is not None:
        found = table.get(device, sorted(by_signature))
        known |= _as_measured({s: m for s, m in found.items() if s in by_signature})
    shared = sum(s in known for s in by_signature)
    fitted = _fitted(kernels, {s: n for s, n in by_signature.items() if s not in known}, sizes)
    fresh = _measure({s: n for s, n in by_signature.items() if s not in known}, fitted)
    if table is not None and fitted:
        fresh |= _as_measured(table.derived({s: fresh[s] for s in fitted}))
    timed = {s: m for s, m in fresh.items() if s not in fitted}
    if table is not None and timed:
        fresh |= _as_measured({s: m for s, m in table.put(device, timed).items() if s in timed})
    known |= fresh
    return Profiled(
        {n: known[s] for n, s in signature_of.items()},
        len(by_signature),
        shared,
        time.perf_counter() - start,
        frozenset(n for n, s in signature_of.items() if s in fitted),
    )


def _as_measured(profiles: Mapping[str, Any]) -> dict[str, Measured]:
    return {s: Measured(int(m[0]), int(m[1])) for s, m in profiles.items()}


def _fitted(kernels: Sequence[fx.Node], unknown: Mapping[str, fx.Node], sizes: Sequence[Profiled]) -> dict[str, int]:
    """What those of the unknown kernels cost that lie between two sizes at which they were measured, in ns."""
    alike = [(list(other.kernels), other.costs) for other in sizes]
    alike = [(theirs, costs) for theirs, costs in alike if same_kernels(kernels, theirs)]
    if len(alike) < 2:
        return {}
    position = {n: i for i, n in enumerate(kernels)}
    found: dict[str, int] = {}
    for text, node in unknown.items():
        there = [(theirs[position[node]], costs) for theirs, costs in alike]
        cost = fitted_cost(node, [(other, costs[other]) for other, costs in there if other in costs])
        if cost is not None:
            found[text] = rounded(cost)
    return found


def signature(node: fx.Node) -> str:
    """A hash of all that a kernel's cost depends on: operator, shapes, strides, dtypes, constants."""
    text = json.dumps([str(node.target), _describe(node.args), _describe(node.kwargs)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def device_kind(nodes: Iterable[fx.Node]) -> str:
    """The device, what else decides there how long a kernel takes, and the way of timing: costs are shared under it."""
    return f"{device_of_values(nodes).describe()} timing {VERSION}"


def device_of_values(nodes: Iterable[fx.Node]) -> Device:
    """Where kernels run that give such values: the first device beside the CPU that holds one of them, or the CPU."""
    there = (t.device for node in nodes for t in tensors(node.meta.get("val")))
    return of(next((device for device in there if device.type != "cpu"), "cpu"))


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


def _measure(nodes: Mapping[str, fx.Node], fitted: Mapping[str, int]) -> dict[str, Measured]:
    """Workspaces of all of them, and times of those whose time is not given in `fitted`."""
    if not nodes:
        return {}
    if _compat.recording():  # the caller's profiler: another thread has none
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(_measure, nodes, fitted).result()
    devices = {s: device_of_values([n]) for s, n in nodes.items()}
    with generators.kept(), _compat.only_real_tensors(), torch.no_grad():
        spaces = _workspaces(nodes, devices)
        calls = {s: partial(_call, n) for s, n in nodes.items() if s not in fitted}
        took = {**fitted, **times(calls, devices)}
        return {s: Measured(took[s], spaces[s]) for s in sorted(nodes)}


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


def _workspaces(nodes: Mapping[str, fx.Node], devices: Mapping[str, Device]) -> dict[str, int]:
    """Bytes that live only while each kernel runs, as the allocator of its device counts them."""
    found: dict[str, int] = {}
    for text, node in sorted(nodes.items()):
        with devices[text].guard():
            _first_call(node)
    for text, node in sorted(nodes.items()):
        with devices[text].guard():
            call, window = _call(node), Window(devices[text].device)
            window.open()
            try:
                kept = call()
            finally:
                peak = window.close()
            found[text] = max(0, peak.peak_bytes - max(0, peak.left_bytes))
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
        text = f"{node.name} ({node.target}) cannot be measured on made-up inputs: {why}"
        raise CaptureError(text, stages_may_do=True) from error
