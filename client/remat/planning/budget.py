"""What a caller may mean by a budget, and the bytes that it comes to."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction as Ratio
from typing import TypeAlias

from remat_ir import Graph, InvalidData, Subject, budget_at, plain_peak, readable

_UNITS = {"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9, "T": 10**12}
_UNITS |= {"TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Fraction:
    """A share of what plain training needs: fixed + fraction · (plain peak − fixed).

    Raises:
        InvalidData: not a number from 0 to 1.
    """

    fraction: float | Ratio

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float, Ratio)):
            raise InvalidData(f"a budget fraction must be a number, not {self.fraction!r}")
        if not 0 <= self.fraction <= 1:
            raise InvalidData(f"a budget fraction must be from 0 to 1, not {self.fraction}")


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes beyond the fixed ones (parameters, buffers, inputs, optimizer state, gradients that exist).

    Takes a number of bytes or text such as "2GiB".

    Raises:
        InvalidData: not a size.
    """

    size: int | str

    def __post_init__(self) -> None:
        bytes_of(self.size)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit of a model beyond its fixed ones, for a model whose units are planned apart.

    While other units run, only what this one keeps for its backward pass is there, so that may be bounded by itself.

    Attributes:
        peak: the most while the unit runs; bytes or text such as "2GiB".
        held: the most from the end of its forward to the start of its backward pass, its outputs included.

    Raises:
        InvalidData: not sizes.

    Example:
        >>> UnitBytes(peak="1GiB", held="100MiB").held
        '100MiB'
    """

    peak: int | str
    held: int | str

    def __post_init__(self) -> None:
        bytes_of(self.peak)
        bytes_of(self.held)


Budget: TypeAlias = int | str | Fraction | ActivationBytes | UnitBytes


_NUMBER = r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*"


def bytes_of(size: object) -> int:
    """A number of bytes, or text such as "12GiB", "1.5 GB" or "4096".

    Raises:
        InvalidData: not a size; the message shows what would be one.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise InvalidData(f"a budget must not be negative: {size}")
        return size
    found = re.fullmatch(_NUMBER + r"([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise InvalidData(f"a budget is bytes or text such as '12GiB' or '800MB', not {size!r}")
    if not found[2] and not found[1].isdigit():
        raise InvalidData(f"a budget is text such as '12GiB', and {size!r} has no unit: write {_meant(found[1])}")
    return int(Ratio(found[1]) * _UNITS[found[2].upper()])


def _meant(number: str) -> str:
    """What a bare number most likely stands for: a share where it is at most 1, else GiB."""
    share = f"'{100 * float(number):g}%' for that share of what plain training needs, or "
    return (share if float(number) <= 1 else "") + f"'{number}GiB' for a size"


def read_budget(budget: object) -> Budget:
    """What a caller gave as a budget: text is read, a percentage as a `Fraction`, a size as bytes.

    Example:
        >>> read_budget("50%"), read_budget("1.5GiB")
        (Fraction(fraction=Fraction(1, 2)), 1610612736)

    Raises:
        InvalidData: it is none; the message shows what would be one.
    """
    if isinstance(budget, (Fraction, ActivationBytes, UnitBytes)):
        return budget
    if isinstance(budget, str):
        share = re.fullmatch(_NUMBER + r"%\s*", budget)
        if share is None:
            return bytes_of(budget)
        if not Ratio(share[1]) <= 100:
            raise InvalidData(f"a share of what plain training needs is at most 100%, not {budget.strip()}")
        return Fraction(Ratio(share[1]) / 100)
    if isinstance(budget, (float, Ratio)):
        raise InvalidData(f"a budget of {budget} has no unit: write {_meant(f'{float(budget):g}')}")
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise InvalidData(
            f"a budget is bytes, text such as '12GiB' or '50%', remat.Fraction or remat.ActivationBytes, not {budget!r}"
        )
    return bytes_of(budget)


def budget_bytes(budget: Budget, subject: Subject, slack: float = 1.0) -> int:
    """The budget of a graph or of stages in bytes, fixed bytes included.

    `slack` is the allocator's share: memory reserved over memory allocated. It applies to bytes of a device, since
    those hold the allocator's waste too, and to nothing else.

    Raises:
        InvalidData: not a budget.
    """
    budget = read_budget(budget)
    if isinstance(budget, Fraction):
        return budget_at(subject, budget.fraction)
    if isinstance(budget, ActivationBytes):
        return subject.fixed_bytes + bytes_of(budget.size)
    if isinstance(budget, UnitBytes):
        return subject.fixed_bytes + bytes_of(budget.peak)
    found = device_budget(budget, slack)
    assert isinstance(found, int)
    return found


def share_for(graph: Graph, size: int) -> str:
    """The share of what plain training needs that comes to so many bytes, rounded up to a tenth of a percent.

    Example:
        >>> from remat_ir import graph_of
        >>> share_for(graph_of([1, 1], [100, 50], [[], [0]]), 70)
        '46.7%'
    """
    return share_of(size - graph.fixed_bytes, plain_peak(graph) - graph.fixed_bytes)


def share_of(size: int, whole: int) -> str:
    """A share of bytes, rounded up to a tenth of a percent."""
    return f"{-(-1000 * max(0, size) // max(1, whole)) / 10:g}%"


def share_sentence(graph: Graph, size: int) -> str:
    """What a share is a share of: said once, since peaks and savings are of the whole step.

    Example:
        >>> from remat_ir import graph_of
        >>> share_sentence(graph_of([1, 1], [100, 50], [[], [0]], fixed_bytes=20), 95)
        'a budget of 95 B: 50% of the 150 B that a step needs beyond the 20 B that are there throughout'
    """
    beyond, fixed = plain_peak(graph) - graph.fixed_bytes, graph.fixed_bytes
    share = f"{100 * (size - fixed) / max(1, beyond):.3g}%"
    there = f"beyond the {readable(fixed)} that are there throughout" if fixed else ""
    return f"a budget of {readable(size)}: {share} of the {readable(beyond)} that a step needs {there}".rstrip()


def bounded(graph: Graph, budget: Budget) -> Graph:
    """The graph to be planned for a budget: where that bounds what is held, the turn has as much room less.

    The op where the backward pass begins gets a workspace of what is not to be held, so that a plan of this graph
    within the peak holds no more than it may.
    """
    if not isinstance(budget, UnitBytes) or graph.backward_from is None:
        return graph
    turn = graph.backward_from
    arriving = sum(graph.value_bytes[v] for v in graph.op_always[turn])
    space = max(0, bytes_of(budget.peak) - bytes_of(budget.held) - arriving)
    spaces = list(graph.op_workspace_bytes)
    spaces[turn] = max(spaces[turn], space)
    return replace(graph, op_workspace_bytes=tuple(spaces))


def device_budget(budget: Budget, slack: float) -> Budget:
    """A budget in bytes of the device less the allocator's share; any other as `read_budget` reads it.

    Raises:
        InvalidData: not a budget.
    """
    budget = read_budget(budget)
    return int(budget / Ratio(slack)) if isinstance(budget, int) and slack != 1.0 else budget
