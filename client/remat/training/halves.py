"""Backward passes in two halves: the gradients of a stage's inputs at once, those of its parameters when asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import torch

Second: TypeAlias = Generator[None, None, Sequence[torch.Tensor | None]]


class Halves:
    """The second halves of one module's backward passes. What they still need is what their functions hold.

    Attributes:
        parameters: those that the gradients are for, by the position of theirs; None: it came with the first half.
        around: is called with the function that runs a second half, in its place.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[torch.Tensor | None] = ()
        self.around: Callable[[Callable[[], None]], None] | None = None
        self._left: Second | None = None

    def first(
        self, function: Callable[[list[Any]], Second], early: Sequence[int], results: int
    ) -> Callable[[list[Any]], tuple[torch.Tensor | None, ...]]:
        """A backward function that stops halfway: of so many results only those at `early` are there."""

        def run(args: list[Any]) -> tuple[torch.Tensor | None, ...]:
            second = function(args)
            next(second)
            found: list[torch.Tensor | None] = [None] * results
            for position, result in zip(early, args, strict=True):
                found[position] = result
            args.clear()
            self._left = second
            return tuple(found)

        return run

    def builder(self) -> Callable[[], None]:
        """The second half of the last backward pass: what `PipelineStage` takes for its `dw_builder`."""
        left, self._left = self._left, None

        def run() -> None:
            if left is not None:
                self._finish(left)

        return lambda: run() if self.around is None else self.around(run)

    @torch.no_grad()  # as autograd runs a backward pass
    def _finish(self, left: Second) -> None:
        try:
            next(left)
        except StopIteration as end:
            gradients = end.value
        seen: set[int] = set()
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            if gradient is None or parameter is None:
                continue
            if parameter.grad is not None:
                parameter.grad += gradient
            else:
                parameter.grad = gradient.clone() if id(gradient) in seen else gradient
                seen.add(id(gradient))
