"""Where everything lies in the array of a profile.

A schedule is a set of (stage, op) pairs: op v runs in stage t, before op t runs for the first time; every pair (v, v)
is in it. Pairs run in the order of their keys t·n + v, each use reads the latest instance, an instance of a value lives
to its last use. So every set is a schedule, and only memory can fail (Checkmate, Section 4, calls the set R).

The profile holds the bytes at every key. It is a list of blocks of up to `BLOCK` keys; each block has a pending addend
and bounds on its entries, so that most of a range addition touches a block in one step.

All of it is one array `m` of 64-bit integers: compiled functions pass one array much faster than a tuple of many. With
n ops, v values, e readings and b blocks at most:

    place        what lies there                             columns of a row
    0            registers                                   N OVER COST BUDGET … BEST_COST
    12           the places below                            OPS_AT VALUES_AT … POOL_END
    OPS_AT       n + 1 ops, OP apart                         READS MAKES OP_COST WORKSPACE LAST STAGES RUNS ROOM
    VALUES_AT    v + 1 values, VALUE apart                   USERS MAKER SIZE KIND
    ← READS      e values that ops read, op by op            value
    ← USERS      e ops that read values, value by value      op
    BLOCKS_AT    the blocks, `BLOCKS` of b + 1               FIRST LAZY TOP BOTTOM COUNT ROW
    FREE_AT      the rows of no block, `FREE` of b           place of the row
    EXTRAS_AT    the recomputations, `EXTRAS` of them        stage, op
    JOURNAL_AT   the changes of a move, `JOURNAL` of them    placed or removed, stage, op
    BEST_AT      the best schedule, `BEST_LENGTH` long       key
    ← ROW        b rows of 2 · BLOCK, from ROWS_AT on        COUNT keys; from BLOCK on the memory at each, less LAZY
    ← STAGES     what each op has room for, from POOL_AT     RUNS times: stage, number among the recomputations
    POOL         the end of what is used
    POOL_END

← X says that column X of a row leads there: it holds an index into `m` itself. What an op reads ends where the next
op's `READS` points, its values end before the next op's `MAKES`, and a value's readers where the next value's `USERS`
points: that is what the row behind the last op and the last value is for. `LAST` is the last stage in which an op may
run. So the i-th stage of an op is `m[m[o + STAGES] + STAGE * i]` with o = `m[OPS_AT] + op * OP`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _numba

Ints: TypeAlias = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 64
compiled: Callable[[F], F] = _numba.kernel(nogil=True, boundscheck=False, error_model="numpy")
int64: Any = np.int64
"""For an argument that is a literal: numba compiles a function once for each literal that it is called with."""
inner: Callable[[F], F] = _numba.inner(boundscheck=False, error_model="numpy")

# registers; OVER is the sum over all keys of max(0, memory − budget)
N, OVER, COST, BUDGET, BLOCKS, FREE, EXTRAS, POOL, JOURNAL, RANDOM, BEST_LENGTH, BEST_COST = range(12)
# places of tables, in their order; most end where the next one starts
OPS_AT, VALUES_AT, BLOCKS_AT, FREE_AT, EXTRAS_AT, JOURNAL_AT, BEST_AT, ROWS_AT, POOL_AT, POOL_END = range(12, 22)
HEAD = 24
# columns of an op; the row behind the last op ends its `READS` and `MAKES`
READS, MAKES, OP_COST, WORKSPACE, LAST, STAGES, RUNS, ROOM = range(8)
OP = 8
# columns of a value; `USERS` likewise
USERS, MAKER, SIZE, KIND = range(4)
VALUE = 4
OPTIONAL, KEEP = 1, 2
# columns of a block: `ROW` leads to its keys, and BLOCK further to the memory at them
FIRST, LAZY, TOP, BOTTOM, COUNT, ROW = range(6)
BLOCK_COLUMNS = 8
# an entry of an op's stages: the stage, and its number among the recomputations
STAGE = 2
