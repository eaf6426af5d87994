"""A graph as one boxed Python function that drops each value at its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from .. import _compat


def halfway(results: tuple[Any, ...]) -> None:
    """Where a graph gives some of its results away: its function is then a generator, and leaves them in the list of
    its arguments when it stops here."""


def boxed_function(module: fx.GraphModule, name: str = "step") -> Callable[[list[Any]], Any]:
    """Compile a graph to a function of one list of arguments, which it empties.

    Operators are bound once and called without torch's Python wrapper. Values that a line is the last to read are
    dropped in that line's successor, so peak memory is that of the graph.
    """
    source, scope = _source(module, name)
    exec(compile(source, f"<remat {name}>", "exec"), scope)
    function = scope[name]
    function.source = source
    return _compat.boxed(function)


def _source(module: fx.GraphModule, name: str) -> tuple[str, dict[str, Any]]:
    scope: dict[str, Any] = {}
    bound: dict[Any, str] = {}

    def bind(thing: Any, prefix: str) -> str:
        key = (type(thing), thing) if isinstance(thing, str) else id(thing)
        if key not in bound:
            bound[key] = f"{prefix}{len(bound)}"
            scope[bound[key]] = thing
        return bound[key]

    def text(argument: Any) -> str:
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
    lines = [f"def {name}(args):"]
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
            lines.append(f"    {names[node]} = {bind(_attribute(module, str(node.target)), 'k')}")
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
        lines[0] = f"def {name}(args, *, {defaults}):"
    return "\n".join(lines) + "\n", scope


def _call(node: fx.Node, text: Callable[[Any], str], bind: Callable[[Any, str], str]) -> str:
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


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
