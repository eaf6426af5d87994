"""A graph as one boxed Python function that drops each value at its last use.

What a forward graph gives when it first runs is compared with what the trace says of it.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from .. import _compat
from ..capture.dataflow import results_of
from ..errors import CaptureError
from ..profiling.inputs import arguments

log = logging.getLogger("remat")


def halfway(results: tuple[object, ...]) -> None:
    """Where a graph gives some of its results away: its function is then a generator, and leaves them in the list of
    its arguments when it stops here."""


def boxed_function(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Compile a graph to a function of one list of arguments, which it empties.

    Operators are bound once and called without torch's Python wrapper. Values that a line is the last to read are
    dropped in that line's successor, so peak memory is that of the graph.
    """
    source, scope = _source(module)
    exec(compile(source, "<remat step>", "exec"), scope)
    return _compat.boxed(scope["step"])


def _source(module: fx.GraphModule) -> tuple[str, dict[str, Any]]:
    scope: dict[str, Any] = {}
    bound: dict[object, str] = {}

    def bind(thing: object, prefix: str) -> str:
        key = (type(thing), thing) if isinstance(thing, str) else id(thing)
        if key not in bound:
            bound[key] = f"{prefix}{len(bound)}"
            scope[bound[key]] = thing
        return bound[key]

    def text(argument: object) -> str:
        if isinstance(argument, fx.Node):
            return names[argument]
        if isinstance(argument, tuple):
            return "(" + "".join(text(a) + ", " for a in argument) + ")"
        if isinstance(argument, list):
            return "[" + ", ".join(map(text, argument)) + "]"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in argument.items()) + "}"
        if argument is None or isinstance(argument, (bool, int, str)):
            return repr(argument)
        return bind(argument, "c")  # floats too: inf and nan have no literal

    nodes = list(module.graph.nodes)
    names = {node: f"v{i}" for i, node in enumerate(nodes)}
    dying = _last_uses(nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    lines = ["def step(args):"]
    if placeholders:
        lines.append("    " + "".join(names[n] + ", " for n in placeholders) + "= args")
    lines.append("    args.clear()")
    unread = [names[n] for n in placeholders if not n.users]
    if unread:
        lines.append("    del " + ", ".join(unread))
    for node in nodes:
        if node.op == "output":
            lines.append(f"    return {text(node.args[0])}")
        elif node.op == "get_attr":
            lines.append(f"    {names[node]} = {bind(operator.attrgetter(str(node.target))(module), 'k')}")
        elif node.target is halfway:
            lines.append(f"    args.extend({text(node.args[0])})")
        elif node.op == "call_function":
            call = _call(node, text, bind)
            lines.append(f"    {names[node]} = {call}" if node.users else f"    {call}")
        drop = [names[n] for n in dying.get(node, ())]
        if drop:
            lines.append("    del " + ", ".join(drop))
        if node.target is halfway:
            lines.append("    yield")
    # names that are bound to globals are looked up faster as defaults of the function
    defaults = ", ".join(f"{n}={n}" for n in scope)
    if defaults:
        lines[0] = f"def step(args, *, {defaults}):"
    return "\n".join(lines) + "\n", scope


def _call(node: fx.Node, text: Callable[[object], str], bind: Callable[[object, str], str]) -> str:
    if node.target is operator.getitem:
        return f"{text(node.args[0])}[{text(node.args[1])}]"
    taken = _compat.OpOverload if not isinstance(node.target, _compat.HigherOrderOperator) else ()
    arguments = [bind(_compat.raw_call(a), "f") if isinstance(a, taken) else text(a) for a in node.args]
    arguments += [f"{key}={text(value)}" for key, value in node.kwargs.items()]
    return f"{bind(_compat.raw_call(node.target), 'f')}({', '.join(arguments)})"


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                dying.setdefault(node, []).append(source)
    return dying


_BEFORE = 2
"""Kernels before one that are run for its inputs: what reads a value that is described wrong is so described itself."""
_STATE = 16
"""Integers of a generator's state, of which each build of attention's kernels keeps its own."""


def checked_function(module: fx.GraphModule, _: object) -> Callable[[list[Any]], Any]:
    """A forward graph as `boxed_function`, whose first call compares what it returns and saves with the trace.

    Whatever state of torch makes a graph run otherwise than it was traced shows here, such as autocast that is applied
    once more, before anything is computed from the results. It takes no other plan and no second step.

    Raises:
        CaptureError: the two differ, in that call: see `_compare`.
    """
    function, due = boxed_function(module), True
    nodes = results_of(module.graph)
    places = [place for place, node in enumerate(nodes) if isinstance(node, fx.Node) and _is_torchs(node)]
    said = [(nodes[place], nodes[place].meta.get("val")) for place in places]

    def run(args: list[Any]) -> Any:
        nonlocal due, said
        results = function(args)
        if due:
            for place, (node, traced) in zip(places, said, strict=True):
                _compare(node, traced, results[place])
            due, said = False, []
        return results

    return _compat.boxed(run)


def _is_torchs(node: fx.Node) -> bool:
    """Whether the trace made it: states of generators, and what crosses to the host, come with the plan."""
    return node.op != "call_function" or node.target is operator.getitem or isinstance(node.target, _compat.OpOverload)


def _compare(node: fx.Node, traced: object, found: object) -> None:
    """Compare a tensor with the trace, which may say nothing of it, or with its kernel where torch describes it wrong.

    Strides are only told of: a custom operator's own description may be careless about them, and most readers take any.

    Raises:
        CaptureError: it has another dtype or shape, or is on another device.
    """
    if not isinstance(traced, _compat.FakeTensor) or not isinstance(found, torch.Tensor):
        return
    if found.numel() <= _STATE and not found.is_floating_point():
        return
    sizes = zip_longest(found.shape, traced.shape)
    shape = tuple(number if isinstance(said, torch.SymInt) else said for number, said in sizes)
    is_open = any(isinstance(number, torch.SymInt) for number in (*traced.shape, *traced.stride()))
    for what, here, there, wrong in (
        ("", found.dtype, traced.dtype, True),
        ("of shape ", tuple(found.shape), shape, True),
        ("on ", found.device, traced.device, True),
        ("of strides ", _strides(found), _strides(found if is_open else traced), False),
    ):
        if here == there or (here is found.dtype and here == _dtype_by_kernel(node)):
            continue
        text = f"{node} of the planned step is {what}{here}, and the trace says {what}{there}"
        if wrong:
            raise CaptureError(
                f"{text}: the step runs under a state of torch that it was not traced under; train without remat, and "
                "report this"
            )
        log.warning("%s: what is read from it as it was traced to lie may be wrong", text)


def _dtype_by_kernel(node: fx.Node) -> torch.dtype | None:
    """What the kernel gives for inputs as they were traced, without autocast; None where it cannot be run apart.

    Torch's description of a kernel may be wrong: of a batch norm in bfloat16 with float32 weights on a CPU the saved
    mean is float32, and is described as bfloat16.
    """
    maker, place = node.args[:2] if node.target is operator.getitem else (node, None)
    if not isinstance(maker, fx.Node) or not isinstance(maker.target, _compat.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in maker.target.tags:
        return None
    try:
        args, kwargs = arguments(maker, depth=_BEFORE)
        device: torch.device = node.meta["val"].device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            result: Any = maker.target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, KeyError, AttributeError) as error:
        log.debug("%s cannot be run apart: %s", maker, error)
        return None
    result = result if place is None else result[place]
    return result.dtype if isinstance(result, torch.Tensor) else None


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where its elements lie: an empty tensor has none, and a dimension of one element has no next one."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
