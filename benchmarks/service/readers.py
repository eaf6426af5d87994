"""How long it takes to read a graph from JSON: the language's own readers, msgspec's and pydantic's schemas.

`python -m benchmarks.service.readers` with msgspec installed. Each reads a body, holds every integer to 0 … 2^53 and
makes the same `Graph`, which checks what no schema says; by processor time, the least of five runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

import pydantic

from benchmarks.harness.table import Report
from benchmarks.service.crowd import step
from remat_ir import Graph, Problem, Written, plain_peak
from remat_ir.read import parse

_COLUMNS = ("op_cost_ns", "op_workspace_bytes", "value_op", "value_bytes", "optional", "once", "keep")
_MOST = 2**53


def _fields(number: Any) -> dict[str, Any]:
    numbers: Any = GenericAlias(list, (number,))
    return {
        "format": str,
        "fixed_bytes": number,
        "op_inputs": GenericAlias(list, (numbers,)),
        "backward_from": number | None,
        **dict.fromkeys(_COLUMNS, numbers),
    }


def _graph(found: Any) -> Graph:
    columns: dict[str, Any] = {name: tuple(getattr(found, name)) for name in _COLUMNS}
    inputs = tuple(map(tuple, found.op_inputs))
    return Graph(op_inputs=inputs, fixed_bytes=found.fixed_bytes, backward_from=found.backward_from, **columns)


def readers() -> dict[str, Callable[[bytes], Graph]]:
    """From the text of a problem to its graph, by name."""
    msgspec: Any = importlib.import_module("msgspec")
    fields = _fields(Annotated[int, msgspec.Meta(ge=0, le=_MOST)])
    decoder = msgspec.json.Decoder(
        msgspec.defstruct("P", [("graph", msgspec.defstruct("G", list(fields.items()))), ("budget_bytes", int)])
    )
    strict = _fields(Annotated[int, pydantic.Field(ge=0, le=_MOST, strict=True)])
    inner: Any = pydantic.create_model("G", **strict)
    model: Any = pydantic.create_model("P", graph=inner, budget_bytes=int)
    return {
        "remat_ir": lambda text: Problem.from_json(parse(text)).graph,
        "msgspec": lambda text: _graph(decoder.decode(text).graph),
        "pydantic": lambda text: _graph(model.model_validate_json(text).graph),
    }


def _least_ms(work: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(times):
            work()
        found.append(1000 * (time.process_time() - begun) / times)
    return min(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the table to this file, as Markdown")
    with Report("Reading a graph", ("ops", "reader", "ms", "ms with digests"), parser.parse_args().out) as report:
        for ops in (300, 3000):
            graph = step(ops, 1)
            text, times = json.dumps(Problem(graph, plain_peak(graph)).to_json()).encode(), 6_000 // ops
            for name, read in readers().items():
                assert read(text) == graph
                both = _least_ms(lambda read=read, text=text: Written(read(text)), times)
                report.add(ops, name, f"{_least_ms(lambda r=read, t=text: r(t), times):.2f}", f"{both:.2f}")


if __name__ == "__main__":
    main()
