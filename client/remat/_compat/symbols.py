"""The symbols of sizes in a trace of both passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .tracing import FakeTensorMode


class Symbols:
    """The symbols of a trace of its own, one for each of Dynamo's, and the guards that the trace sets on them.

    Dynamo's own environment takes no guards any more once its graph is compiled.

    Args:
        numbers: what each of Dynamo's symbols is in the call that is traced; at least 2, for 0 and 1 are no symbols.

    Attributes:
        mode: of the fake tensors.
    """

    def __init__(self, numbers: Mapping[Any, Any]) -> None:
        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env)
        is_open: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        self._own = {}
        for symbol, number in numbers.items():
            rows: Any = self.mode.from_tensor(torch.empty(int(number), device="meta"), symbolic_context=is_open)
            self._own[symbol] = rows.shape[0].node.expr
        self._traced_at = {self._own[symbol]: number for symbol, number in numbers.items()}

    def _of(self, number: Any) -> Any:
        if not isinstance(number, torch.SymInt):
            return number
        expression = number.node.expr.xreplace(self._own)
        return self._env.create_symintnode(expression, hint=int(expression.xreplace(self._traced_at)))

    def like(self, given: Any, example: Any = None) -> Any:
        """What is traced in place of an input, whose sizes are symbols where those of Dynamo's example are.

        Memory that a tensor of such sizes shares with others is not known of it. A number that is no symbol here, since
        nothing reads it, is 0.0.
        """
        if isinstance(example, torch.SymInt):
            return self._of(example) if example.node.expr.free_symbols <= self._own.keys() else 0.0
        if not isinstance(given, torch.Tensor):
            return given
        sizes = () if example is None else (*example.shape, *example.stride())
        if not any(isinstance(number, torch.SymInt) for number in sizes):
            return self.mode.from_tensor(given, static_shapes=True)
        shape, strides = ([self._of(number) for number in numbers] for numbers in (example.shape, example.stride()))
        with self.mode:
            made = torch.empty_strided(shape, strides, dtype=given.dtype, device=given.device)
        return made.requires_grad_(given.requires_grad)

    def values(self, numbers: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """What each symbol is in a call, by what Dynamo's are; None where the trace does not hold for that call."""
        env = self._env
        found = {self._own[symbol]: number for symbol, number in numbers.items()}
        guards = [guard.expr for guard in env.guards]
        guards += [sympy.Eq(symbol, other) for symbol, other in env.replacements.items()]
        holds = not env.deferred_runtime_asserts
        holds = holds and all(number in env.var_to_range.get(symbol, (number,)) for symbol, number in found.items())
        return found if holds and all(guard.xreplace(found) is sympy.true for guard in guards) else None
