"""Captures kept on this machine, for the next process of the same job: files that only their owner could write.

Files are found by the call's classes, train modes, metadata and surroundings. One is used where the digest of all that
the capture depends on is the one that it was kept with (`remat.capture.fingerprint`). Guards are built again on what is
there. A file that is damaged, of another version, or that somebody else could have written, is a miss, as is whatever
is not as it was; the call is then captured, and kept next to them.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import logging
import os
import re
import stat
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from remat_ir import InvalidData
from remat_ir.schema import members, parse

from .. import _compat
from ..device import AUTOCAST_KINDS
from ..device_flags import choices
from ..planning.folder import trim, write_whole
from ..settings import settings
from .code import code_digest, names_variables, without_order
from .dataflow import tensors
from .fingerprint import Walk
from .objects import ATOMS, NotKept

FORMAT = "remat-capture/3"

KEPT_FROM_S = 2.0
"""Captures that took less CPU time are made again: that is soon done."""

MOST = 8
"""Captures kept of calls that differ in their configuration alone: of these, the last used."""

REPLACED_ATTENTION = frozenset(
    {"aten/scaled_dot_product_attention/CUDA", "aten/scaled_dot_product_attention/AutogradCUDA"}
)
"""What `remat.target.attention` puts in place of torch's."""

log = logging.getLogger("remat")


class Captures:
    """The captures under one folder.

    Args:
        from_s: captures that took less CPU time are not kept.
    """

    def __init__(self, folder: Path, from_s: float) -> None:
        self.folder, self.from_s = folder, from_s

    @classmethod
    def here(cls) -> Captures | None:
        """Those of this machine; None unless REMAT_KEEP_CAPTURES=1 says that they are kept."""
        found = settings()
        return cls(found.cache_dir / "captures", KEPT_FROM_S) if found.keep_captures else None

    def find(
        self, module: nn.Module, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, _compat.CallGuards] | None:
        """The descriptor and the guards of a capture of this very call, or None."""
        walks: dict[tuple[str, ...], Walk] = {}
        try:
            for path in self._candidates(self._name(module, run, args, kwargs)):
                found = _read(path)
                if found is None:
                    continue
                head, data = found
                code = tuple(head["code"])
                walk = walks.get(code) or Walk(_roots(run, args, kwargs), frozenset(code))
                walks[code] = walk
                if walk.digest() != head["digest"] or any(walk.order(n) != order for n, order in head["orders"]):
                    log.debug("the capture that is kept is of other code, or of another configuration: %s", path)
                    continue
                restored = _restored(data, run, args, kwargs)
                log.info("%s was captured before: %s", type(module).__name__, path.name)
                os.utime(path)
                return restored
            return None
        except (NotKept, _compat.Unreadable) as error:
            log.debug("no capture that is kept can be used: %s", error)
            return None
        except Exception as error:  # whatever objects do when they are looked at, the step can be traced
            log.warning("no capture that is kept can be used: %s: %s", type(error).__name__, error)
            return None

    def keep(
        self,
        graph: Any,
        guards: _compat.CallGuards,
        descriptor: Any,
        module: nn.Module,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Keep a capture, if another process can know that it holds there; returns whether it is kept.

        Args:
            graph: as Dynamo made it.
            guards: of that graph.
        """
        try:
            if guards.names:
                raise NotKept(f"the code reads a tensor that is neither parameter nor buffer: {guards.names[0]}")
            name = self._name(module, run, args, kwargs)
            codes = {code_digest(code): code for code in _compat.traced_code(graph)}
            walk = Walk(_roots(run, args, kwargs), frozenset(codes))
            _check_code(walk, codes)
            _check_variables(graph, codes, _compat.globals_of(run), guards.local(run, args, kwargs))
            sets = _check_readings(walk, graph, codes, _compat.globals_of(run), guards.local(run, args, kwargs))
            data = _compat.pack(graph, descriptor)
            if not same(descriptor, _restored(data, run, args, kwargs)[0]):
                raise NotKept("its graph does not come out as it went in")
        except (NotKept, _compat.Unreadable) as error:
            log.info("the capture is not kept: %s", error)
            return False
        except Exception as error:
            log.warning("the capture is not kept: %s: %s", type(error).__name__, error)
            return False
        orders = [(number, walk.order(number)) for number in sorted(sets)]
        head: dict[str, Any] = {"format": FORMAT, "digest": walk.digest(), "code": sorted(codes), "orders": orders}
        head["sha256"] = _sum(head, data)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.folder / f"{name}-{walk.digest()[:16]}.capture"
            written = write_whole(path, json.dumps(head).encode() + b"\n" + data)
            for old in self._candidates(name)[MOST:]:
                old.unlink(missing_ok=True)
            trim(self.folder)
            return written
        return False

    def _name(self, module: nn.Module, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What the files of captures of such a call are called, before their digests."""
        parts = [(name, type(p).__module__, type(p).__qualname__, p.training) for name, p in module.named_modules()]
        given = [(str(t.dtype), str(t.device), tuple(t.shape)) for t in tensors((args, kwargs, *module.parameters()))]
        autocast = [(torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in AUTOCAST_KINDS]
        around = (_own_code(), _compat.surroundings(REPLACED_ATTENTION), choices(), autocast)
        what = (FORMAT, getattr(run, "__qualname__", ""), parts, given, around)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:48]

    def _candidates(self, name: str) -> list[Path]:
        """The files of calls that differ in what the digest tells alone, the last used first."""
        found = [(path.stat().st_mtime_ns, path) for path in self.folder.glob(f"{name}-*.capture")]
        return [path for _, path in sorted(found, reverse=True)]


def _roots(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return run, tuple(args), dict(kwargs)


def _restored(
    data: bytes, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, _compat.CallGuards]:
    """A capture from its bytes, with guards that hold for this call."""
    mode = _compat.detect_fake_mode([*tensors((args, kwargs))])
    descriptor, root = _compat.unpack(data, mode, _compat.globals_of(run))
    return descriptor, _compat.CallGuards(run, args, kwargs, root)


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """The two parts of a file, if it is what was written, and nobody else could write it."""
    try:
        for place in (path.parent, path):
            there = place.stat()
            if there.st_uid != os.geteuid() or there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                log.warning("captures in %s are ignored: others may write %s", path.parent, place)
                return None
        line, _, data = path.read_bytes().partition(b"\n")
        head = dict(members(parse(line), "capture", ("digest", "code", "orders", "sha256"), (), FORMAT))
        said = head.pop("sha256")
    except OSError:
        return None
    except InvalidData as error:
        log.warning("captures: %s is ignored: %s", path, error)
        return None
    if said != _sum({**head, "format": FORMAT}, data):
        log.warning("captures: %s is ignored: it is not what was written", path)
        return None
    return head, data


def _sum(head: Mapping[str, Any], data: bytes) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode() + data).hexdigest()


@cache
def _own_code() -> str:
    """The code of this package, which is as much a part of a capture as the model's."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _check_code(walk: Walk, codes: Mapping[str, Any]) -> None:
    """See that the digest covers all code that was traced, by way of the function that it is the code of.

    Raises:
        NotKept: it does not.
    """
    for digest, code in codes.items():
        if digest not in walk.codes and f"{os.sep}torch{os.sep}_dynamo{os.sep}" not in code.co_filename:
            raise NotKept(f"the code of {code.co_qualname} was traced, and nothing says how it was found")


def _check_variables(graph: Any, codes: Mapping[str, Any], scope: dict[str, Any], local: dict[str, Any] | None) -> None:
    """See that the names of the environment variables that were asked for are known, those that are not there too.

    Raises:
        NotKept: they are not.
    """
    values = _compat.Values({"G": scope, "L": local}, {})
    for source in _compat.readings(graph)[0]:
        if source.name.endswith("._data") and values.of(source) is _compat.variables_of(os.environ):
            spelled = source.name.endswith(".environ._data") and all(map(names_variables, codes.values()))
            if not spelled:
                raise NotKept("the code puts the name of an environment variable together")


_OF_A_MODULE = re.compile(r"L\['self'\](\._modules\['[^']+'\])*(\._?\w+)?\Z")
"""Modules and their own attributes, all of which are covered."""


_MADE = (tuple, types.CellType, types.CodeType, types.MethodType, types.BuiltinFunctionType, types.MappingProxyType)
"""What Python makes anew of what it is part of."""

_DERIVED = re.compile(r"(dict|list|set)\(|L\['\w+'\]\Z|.*\.__dict__\Z")
"""What Dynamo makes of what it reads, and the variables that a call begins with."""


def _check_readings(
    walk: Walk, graph: Any, codes: Mapping[str, Any], scope: dict[str, Any], local: dict[str, Any] | None
) -> set[int]:
    """See that the digest covers all that the traced code read; gives the numbers of sets in it whose order counts.

    Raises:
        NotKept: it does not.
    """
    sources, step = _compat.readings(graph)
    values = _compat.Values({"G": scope, "L": local}, {})
    owners: dict[Any, Any] = {}
    """By the steps that were seen: what the next one's name is a member of, `_NOBODY` or `_DYNAMO`."""

    def see(source: Any) -> Any:
        if source not in owners:
            base, name = step(source)
            owner: Any = see(base) if base else scope if source.name.startswith("G['") else _NOBODY
            owners[source] = owner if owner is _DYNAMO else _owner(walk, values, owner, source, name)
        return owners[source]

    for source in sources:
        if not _OF_A_MODULE.match(source.name):
            see(source)
    found = ((source, walk.number(values.of(source))) for source in dict.fromkeys((*owners, *sources)))
    return {n for source, n in found if n is not None and not without_order(codes.values(), step(source)[1])}


_NOBODY, _DYNAMO = object(), object()


def _owner(walk: Walk, values: _compat.Values, owner: Any, source: Any, name: str) -> Any:
    """What the name in a step after a source is a member of.

    Args:
        owner: what the source's own name is a member of.

    Raises:
        NotKept: the digest does not cover what it stands for.
    """
    expression = source.name
    special = name.startswith("__") and name.endswith("__")
    if owner is not _NOBODY and name and not special and not walk.covers(owner, name):
        raise NotKept(f"tracing read {expression}, which nothing tells apart")
    try:
        thing = values.of(source)
    except Exception as error:
        raise NotKept(f"tracing read {expression}, which cannot be read again: {error}") from error
    if thing is vars(builtins) or (isinstance(thing, type) and vars(builtins).get(thing.__name__) is thing):
        return _NOBODY  # what is Python's own; of what somebody puts there, what the code names is covered
    if isinstance(thing, types.ModuleType) and thing.__name__.startswith("torch._dynamo."):
        return _DYNAMO  # Dynamo's own code in place of Python's
    if walk.reached(thing) or isinstance(thing, types.ModuleType):
        return thing
    if type(thing) not in (*ATOMS, *_MADE) and not _DERIVED.match(expression):
        raise NotKept(f"tracing read {expression}, which nothing leads to")
    return _NOBODY if name and not special else owner


def same(one: Any, other: Any) -> bool:
    """Whether the graphs of two descriptors are one: kernels, their arguments, metadata and storages, constants."""
    return list(_said(_compat.joint_graph(one))) == list(_said(_compat.joint_graph(other)))


def _said(joint: fx.GraphModule) -> Iterator[tuple[Any, ...]]:
    """Each node of a graph: what it does, and the metadata of its tensors, storages numbered as they come."""
    storages: dict[int, int] = {}
    for node in joint.graph.nodes:
        like = [
            (t.dtype, t.device, t.shape, t.stride(), t.storage_offset(), t.requires_grad)
            for t in tensors(node.meta.get("val"))
        ]
        held = [
            (storages.setdefault(_compat.storage_key(t), len(storages)), t.untyped_storage().nbytes())
            for t in tensors(node.meta.get("val"))
        ]
        described = _compat.description_of(node)
        value = _compat.constant(joint, node) if node.op == "get_attr" else None
        yield node.name, node.op, node.target, repr(node.args), repr(node.kwargs), like, held, described, value
