"""A few sizes in the place of many: batches of varying length are padded to the next bucket, and each has one plan."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat_ir import InvalidData


@dataclass(frozen=True)
class Buckets:
    """Lengths that batches are padded to; a training run plans no more kinds of steps than there are sizes.

    Attributes:
        sizes: lengths, ascending.

    Raises:
        InvalidData: no sizes, or some that are not positive and ascending.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise InvalidData(f"bucket sizes must be positive and ascending, not {self.sizes}")

    @classmethod
    def of(cls, lengths: Iterable[int], most: int = 8, multiple_of: int = 1) -> Buckets:
        """The sizes that pad the least in all: at most `most` of them, found by dynamic programming over the lengths.

        Args:
            lengths: of the training set's batches, or of a sample of them that has the longest.
            multiple_of: of what every size is a multiple, for kernels that like it.

        Raises:
            InvalidData: no lengths, or numbers that are not positive.
        """
        if most < 1 or multiple_of < 1:
            raise InvalidData(f"most and multiple_of must be at least 1, not {most} and {multiple_of}")
        counts = Counter(-(-length // multiple_of) * multiple_of for length in lengths)
        if not counts or min(counts) < 1:
            raise InvalidData("buckets need lengths, all of them positive")
        sizes = sorted(counts)
        before = [0]
        for size in sizes:
            before.append(before[-1] + counts[size])
        # cost[j]: padded elements of the first j sizes in the buckets so far, the last of which ends at size j
        cost: list[float] = [0.0, *(float("inf") for _ in sizes)]
        cuts: list[list[int]] = []
        for _ in range(min(most, len(sizes))):
            previous, cost, cut = cost, [0.0], [0]
            for j, size in enumerate(sizes, 1):
                best = min((previous[i] + size * (before[j] - before[i]), i) for i in range(j))
                cost.append(best[0])
                cut.append(best[1])
            cuts.append(cut)
        chosen: list[int] = []
        end = len(sizes)
        for cut in reversed(cuts):
            if end:
                chosen.append(sizes[end - 1])
                end = cut[end]
        return cls(tuple(sorted(chosen)))

    def size(self, length: int) -> int:
        """The bucket of a length.

        Raises:
            InvalidData: it is longer than the largest.
        """
        at = bisect_left(self.sizes, length)
        if at == len(self.sizes):
            raise InvalidData(f"a length of {length} is over the largest bucket, {self.sizes[-1]}")
        return self.sizes[at]

    def pad(self, batch: Mapping[str, Any], values: Mapping[str, float], dim: int = 1) -> dict[str, Any]:
        """A batch with the tensors named in `values` padded at the end of a dimension; the others stay.

        All batches of a bucket come out as one kind of call: each named tensor is a contiguous one of its own, also
        where nothing is added, since a batch whose labels are its tokens, or a slice of longer ones, is another kind.

        With the attention mask padded by 0 and labels by the index that the loss ignores, the loss is that of the batch
        as it was, up to the order of sums.

        Raises:
            InvalidData: the named tensors are not of one length, or too long.
        """
        lengths = {batch[name].shape[dim] for name in values if name in batch}
        if len(lengths) != 1:
            raise InvalidData(f"{', '.join(sorted(values))} must be tensors of one length, not {sorted(lengths)}")
        length = lengths.pop()
        extra = self.size(length) - length
        return {
            name: _longer(value, dim, extra, values[name]) if name in values else value for name, value in batch.items()
        }


def _longer(tensor: torch.Tensor, dim: int, extra: int, value: float) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = extra
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)
