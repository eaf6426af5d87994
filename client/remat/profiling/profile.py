"""What each kernel of a captured step costs: measured once for each signature, on inputs made from its metadata."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import fx

from remat_ir import duration

from .. import _compat, generators
from ..capture.dataflow import is_unknown, tensors, value_bytes
from ..capture.operations import custom_name
from ..device import Accelerator, Device, of
from ..device_flags import BENCHMARK, device_failed, out_of_memory, risks
from ..errors import CaptureError
from ..planning.profiles import Profile, ProfileTable
from .collectives import collective_costs, no_collectives
from .inputs import DEPTHS, arguments
from .measure import Window
from .timing import VERSION, elements, fitted_cost, outliers, rounded, same_kernels, times

log = logging.getLogger("remat")

Make: TypeAlias = Callable[[], Callable[[], object]]
"""Makes a kernel's inputs, and returns what runs it on them."""

Given: TypeAlias = Mapping[fx.Node, torch.Tensor]

CALL_NS, MOST_BYTES_PER_NS = 100, 50_000
"""No call of a kernel takes less, and no memory is written faster: 50 TB/s is twice what caches of accelerators do."""


CHECKED, WORTH_NS = 5, 1_000_000
"""So many of a table's costliest kernels are measured again, unless they take less than this together."""

SUSPECTS = 8
"""So many at most of those that `outliers` finds are measured again, too."""

UNLIKE, APART, NOISE_NS = 1.3, 2.0, 100_000
"""A table is not believed where most of its costliest kernels are off by more than the first factor, and by more than
this time; nor is any cost that is off by more than the second factor."""


class Profiled(NamedTuple):
    """The cost of each kernel, and where it is from.

    Attributes:
        signatures, shared: how many kinds of kernels there were, and how many of them came from the shared table.
        fitted: those whose time was not measured but follows from two other sizes.
        neighbours: those that could not be measured, and take the cost of the kernel whose size is nearest.
        elements: of what each of them reads and writes: by these the costs at other sizes are fitted.
        spread: how far the samples of what was timed here lay apart, as `spread_of` has it; None: nothing was timed.
        known: by what the table has them; a graph of symbols does not say it.
    """

    kernels: Mapping[fx.Node, Profile]
    signatures: int
    shared: int
    seconds: float
    fitted: frozenset[fx.Node] = frozenset()
    neighbours: frozenset[fx.Node] = frozenset()
    elements: Mapping[fx.Node, int] = MappingProxyType({})
    spread: float | None = None
    known: frozenset[str] = frozenset()

    def of(self, like: Mapping[fx.Node, fx.Node]) -> Profiled:
        """The same of the kernels of another graph, which has a node like each of these."""
        return self._replace(
            kernels={like[node]: measured for node, measured in self.kernels.items()},
            fitted=frozenset(like[node] for node in self.fitted),
            neighbours=frozenset(like[node] for node in self.neighbours),
            elements={like[node]: count for node, count in self.elements.items()},
        )

    @property
    def costs(self) -> dict[fx.Node, int]:
        """The costs in ns of the kernels that were measured, in the order in which they run."""
        apart = self.fitted | self.neighbours
        return {n: m.cost_ns for n, m in self.kernels.items() if n not in apart}


def profile_kernels(
    kernels: Iterable[fx.Node],
    table: ProfileTable | None = None,
    sizes: Sequence[Profiled] = (),
    given: Given | None = None,
    functional: Collection[str] = (),
) -> Profiled:
    """Cost in ns and workspace in bytes of each kernel, each signature looked up first and measured if unknown.

    A collective's cost follows from the link between its ranks: see `collective_costs`.

    Needs the memory of the largest single kernel, not that of the step. Generators' states are left as they were.

    Args:
        sizes: the same step at other sizes. A kernel between two of them is not timed; its workspace is measured all
            the same, since budgets depend on it. What is not measured is not shared.
        given: real values of the graph's inputs, for kernels that refuse made-up ones.
        functional: custom operators that may run more often than the caller runs them. Any other is not run to be
            measured, since it may draw numbers or count its calls, and takes the cost of the kernel nearest in size.

    A kernel that refuses inputs made from its metadata is measured on what the kernels before it make; one that refuses
    those, too, takes the cost of the kernel whose size is nearest. The log says so.

    Raises:
        CaptureError: no kernel could be measured.
        torch.OutOfMemoryError: a kernel does not fit into the device's memory by itself.
    """
    start = time.perf_counter()
    kernels = list(kernels)
    signature_of = {node: signature(node) for node in kernels}
    by_signature: dict[str, fx.Node] = {}
    for node, text in signature_of.items():
        by_signature.setdefault(text, node)
    device = device_kind(by_signature.values())
    meta = device.startswith("meta ")
    if meta:
        log.warning("on the meta device no kernel can be timed: bytes are right, and all that depends on times is not")
    if isinstance(device_of_values(by_signature.values()), Accelerator) and BENCHMARK in risks():
        log.warning(BENCHMARK)
    collectives = [n for n in kernels if _compat.is_collective(n.target)]
    known = {signature_of[n]: m for n, m in collective_costs(collectives, table, device).items()}
    by_signature = {s: n for s, n in by_signature.items() if s not in known}
    told: dict[str, Profile] = {}
    if table is not None:
        told = {s: m for s, m in table.get(device, sorted(by_signature)).items() if s in by_signature}
        told = told if meta else believed(told, {s: [n] for s, n in by_signature.items()})
    doubted: dict[str, Profile | None] = {}
    if table is not None and not meta and not sizes:  # at the first size it is looked at
        doubted = _contradicted(told, by_signature, given or {}, table.alone)
        table.forget(device, doubted)
    known |= {s: m for s, m in told.items() if s not in doubted}
    shared = sum(s in known for s in by_signature)
    again = {s: m for s, m in doubted.items() if m is not None}
    unknown = {s: n for s, n in by_signature.items() if s not in known and s not in again}
    fitted = _fitted(kernels, unknown, sizes)
    apart = {s for s, n in unknown.items() if is_unknown(n) and custom_name(n) not in functional}
    fresh, spread = _measure({s: n for s, n in unknown.items() if s not in apart}, fitted, given or {})
    refused = {s: n for s, n in unknown.items() if s not in fresh}
    fresh |= again
    measured = {by_signature[s]: m for s, m in (known | fresh).items() if s in by_signature}
    fresh |= {s: _nearest(n, measured) for s, n in refused.items()}
    if table is not None and fresh:  # the same calls in all processes, whatever each of them could measure
        stands = _shared(table, device, fresh, {*refused, *fitted})
        fresh |= {s: m for s, m in stands.items() if s not in doubted}
    known |= fresh
    return Profiled(
        {n: known[s] for n, s in signature_of.items()},
        len(by_signature),
        shared,
        time.perf_counter() - start,
        frozenset(n for n, s in signature_of.items() if s in fitted),
        frozenset(n for n, s in signature_of.items() if s in refused),
        {n: elements(n) for n in kernels},
        spread,
        frozenset(signature_of.values()),
    )


def _shared(
    table: ProfileTable, device: str, fresh: Mapping[str, Profile], unmeasured: Collection[str]
) -> dict[str, Profile]:
    """The costs that stand in the table once these are put there; those that are not measured are not put."""
    derived = {s: m for s, m in fresh.items() if s in unmeasured}
    stands = {**table.derived(derived), **table.put(device, {s: m for s, m in fresh.items() if s not in derived})}
    return {s: m for s, m in stands.items() if s in fresh}


def believed(found: Mapping[str, Profile], nodes: Mapping[str, Sequence[fx.Node]]) -> dict[str, Profile]:
    """The profiles of a table that some device could have: a call takes its time, and so does writing what it makes.

    The rest is measured here as if it were unknown, and the log warns.
    """
    least = {s: CALL_NS + sum(map(value_bytes, nodes[s])) // MOST_BYTES_PER_NS for s in found}
    fine = {s: m for s, m in found.items() if m.cost_ns >= least[s]}
    if len(fine) < len(found):
        log.warning(
            "%d of %d costs in the profile table are less than any device needs; these kernels are measured here",
            len(found) - len(fine),
            len(found),
        )
    return fine


def _contradicted(
    told: Mapping[str, Profile], nodes: Mapping[str, fx.Node], given: Given, alone: bool
) -> dict[str, Profile | None]:
    """Which costs of a table are not believed here, with what was measured instead; None: it has still to be measured.

    Measured again are its costliest kernels, and those that are far off what the others of the step suggest. Where most
    of the costliest are off by more than `UNLIKE`, so is the whole table; else each cost stands or falls by itself.

    Args:
        alone: whether what is found here counts; else the log alone has it, since other processes use the table, too.
    """
    costliest = sorted(told, key=lambda s: (-told[s].cost_ns, s))[:CHECKED]
    if sum(told[s].cost_ns for s in costliest) < WORTH_NS:
        return {}
    suspects = outliers({s: m.cost_ns for s, m in told.items()}, nodes)[:SUSPECTS]
    looked_at = {s: nodes[s] for s in (*costliest, *suspects) if not is_unknown(nodes[s])}
    found, _ = _measure(looked_at, {}, given)
    unlike = _unlike(costliest, told, found)
    if unlike:  # a busy moment only ever adds: they are looked at twice, and the lesser measurement counts
        again, _ = _measure({s: nodes[s] for s in unlike}, {}, given)
        found |= {s: min(m, found[s]) for s, m in again.items()}
        unlike = _unlike(unlike, told, found)
    off = {s: m for s, m in found.items() if _differs(m.cost_ns, told[s].cost_ns, APART)}
    whole = 2 * len(unlike) > sum(s in found for s in costliest)
    if off or whole:
        log.warning(
            "the profile table says %s for %d kernels that take %s here; this machine, or the one that filled the "
            "table, was busy with other work: %s",
            duration(sum(told[s].cost_ns for s in found)),
            len(found),
            duration(sum(m.cost_ns for m in found.values())),
            "the table counts, since all ranks use it"
            if not alone
            else "all are measured anew"
            if whole
            else "these count as here",
        )
    return {} if not alone else {**dict.fromkeys(told), **found} if whole else dict(off)


def _unlike(names: Sequence[str], told: Mapping[str, Profile], found: Mapping[str, Profile]) -> list[str]:
    """Those of some kernels whose costs in the table and here differ by more than `UNLIKE`."""
    return [s for s in names if s in found and _differs(found[s].cost_ns, told[s].cost_ns, UNLIKE)]


def _differs(one: int, other: int, factor: float) -> bool:
    return max(one, other) > factor * min(one, other) + NOISE_NS


def _fitted(kernels: Sequence[fx.Node], unknown: Mapping[str, fx.Node], sizes: Sequence[Profiled]) -> dict[str, int]:
    """What those of the unknown kernels cost that lie between two sizes at which they were measured, in ns."""
    alike = [other for other in sizes if other.elements and same_kernels(kernels, list(other.kernels))]
    if len(alike) < 2:
        return {}
    known = [(list(other.kernels), other.elements, other.costs) for other in alike]
    position = {n: i for i, n in enumerate(kernels)}
    found: dict[str, int] = {}
    for text, node in unknown.items():
        there = [(theirs[position[node]], counts, costs) for theirs, counts, costs in known]
        cost = fitted_cost(elements(node), [(counts[n], costs[n]) for n, counts, costs in there if n in costs])
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
    """Where kernels run that give such values: the first device besides the CPU that holds one of them, or the CPU."""
    there = (t.device for node in nodes for t in tensors(node.meta.get("val")))
    return of(next((device for device in there if device.type != "cpu"), "cpu"))


def _describe(thing: object) -> object:
    if isinstance(thing, fx.Node):
        value = thing.meta.get("val")
        if value is None and thing.op == "get_attr":  # what a higher-order operator runs
            value = getattr(getattr(thing.graph.owning_module, str(thing.target)), "code", None)
        return [describe_tensor(t) for t in tensors(value)] or str(value)
    if isinstance(thing, (list, tuple)):
        return [_describe(item) for item in thing]
    if isinstance(thing, Mapping):
        return {str(key): _describe(value) for key, value in sorted(thing.items())}
    return repr(thing)


def describe_tensor(tensor: torch.Tensor) -> list[object]:
    """All of a tensor that a kernel's cost depends on."""
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), tensor.device.type]


def _measure(
    nodes: Mapping[str, fx.Node], fitted: Mapping[str, int], given: Given
) -> tuple[dict[str, Profile], float | None]:
    """Workspaces of those that can be run, and times of those whose time is not given in `fitted`; their spread."""
    if not nodes:
        return {}, None
    if _compat.recording():  # the caller's profiler: another thread has none
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(_measure, nodes, fitted, given).result()
    devices = {s: device_of_values([n]) for s, n in nodes.items()}
    with _compat.only_real_tensors(), torch.no_grad():
        makes = _makers(nodes, devices, given)
        spaces = _workspaces(makes, devices)
        timed = times({s: make for s, make in makes.items() if s not in fitted}, devices)
        took = {**fitted, **timed.costs}
        return {s: Profile(took[s], spaces[s]) for s in sorted(makes)}, timed.spread


def _workspaces(makes: Mapping[str, Make], devices: Mapping[str, Device]) -> dict[str, int]:
    """Bytes that live only while each kernel runs, as the allocator of its device counts them."""
    found: dict[str, int] = {}
    for text, make in sorted(makes.items()):
        with devices[text].guard():
            call, window = make(), Window(devices[text].device)
            run: Callable[[], object] = call
            around: AbstractContextManager[object] = nullcontext()
            if isinstance(call, generators.Restoring):  # the states that it notes are not the kernel's
                run, around = call.kernel, call.around()
            with around:
                window.open()
                try:
                    kept = run()
                finally:
                    peak = window.close()
            found[text] = max(0, peak.peak_bytes - max(0, peak.left_bytes))
            del kept, call, run
    return found


def _makers(nodes: Mapping[str, fx.Node], devices: Mapping[str, Device], given: Given) -> dict[str, Make]:
    """What makes the inputs of each kernel that runs on them; each has run once, since first calls may allocate what
    later ones reuse."""
    found: dict[str, Make] = {}
    for text, node in sorted(nodes.items()):
        refused, what = "", f"{node.name} ({node.target})"
        for depth in DEPTHS:
            make = partial(_call, node, depth, given)
            # a custom operator may hide collectives
            alone: AbstractContextManager[object] = no_collectives(what) if is_unknown(node) else nullcontext()
            try:
                with devices[text].guard(), alone:
                    make()()
            except (RuntimeError, ValueError, IndexError) as error:
                if device_failed(error) and not (depth and out_of_memory(error)):
                    why = str(error).partition("\n")[0]
                    if out_of_memory(error):
                        raise torch.OutOfMemoryError(
                            f"{what} does not fit into what is left of {devices[text].device}, "
                            f"where it is measured by itself on tensors of its own: {why}; give it smaller inputs, or "
                            "plan while less lives on the device"
                        ) from error
                    raise CaptureError(f"{what} cannot be measured: {why}", stages_may_do=True) from error
                refused = refused or str(error).partition("\n")[0]
            else:
                found[text] = make
                break
        if refused:
            how = "on what precedes it makes" if text in found else "not at all, and taken for its neighbour in size"
            log.log(
                logging.INFO if text in found else logging.WARNING,
                "%s refuses made-up inputs (%s): it is measured %s",
                what,
                refused,
                how,
            )
    return found


def _call(node: fx.Node, depth: int | None = 0, given: Given | None = None) -> Callable[[], object]:
    args, kwargs = arguments(node, depth, given)
    return generators.call(node.target, args, kwargs, anything=is_unknown(node))


def _nearest(node: fx.Node, measured: Mapping[fx.Node, Profile]) -> Profile:
    """The cost of the measured kernel whose size is nearest.

    Raises:
        CaptureError: none could be measured.
    """
    if not measured:
        raise CaptureError(
            f"{node.name} ({node.target}) cannot be measured: it refuses made-up inputs, and so does every other "
            "kernel of the step, whose cost could stand for its",
            stages_may_do=True,
        )
    here = elements(node)
    nearest = min(measured, key=lambda other: (abs(elements(other) - here), other.name))
    return measured[nearest]
