"""Op-level training graphs, generated: the same name gives the same graph on every machine.

Costs are a roofline: the longer of arithmetic at 100 TFLOP/s and traffic at 1.5 TB/s, plus 3 µs for the launch. Sizes
are those of the tensors in 16-bit floats. Backward ops are derived from the forward ones as autograd derives them.

Each family comes in two kinds. `gpt-12` is in the papers' model: one value per op, nothing kept, no workspace.
`gpt-12-whole` is in the whole model: backward ops make several gradients at once, those of parameters stay to the end,
normalisations and attention also make statistics, convolutions have workspaces, the loss and the incoming tangent are
`once` ops. `tape-L` is a chain of blocks lifted to a graph, whose tapes are optional values.

    family        L counts                  ops
    vgg-L         convolutions              about 6 L
    resnet-L      bottleneck blocks         about 25 L (whole: 21 L)
    unet-L        levels                    about 42 L (whole: 36 L)
    densenet-L    layers in all             about 19 L (whole: 16 L)
    gpt-L         transformer layers        about 30 L (whole: 22 L)
    random-L      forward ops               about 4 L, layered, with a backward pass
    dag-L         ops                       L, layered, without a backward pass
    dense-L       ops                       the same with up to nine inputs an op
    tape-L        blocks                    2 L + 1

The random families (random, dag, dense, tape) have a graph for each seed: `dag-250-s3`; without one it is their first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from remat_ir import Graph, InvalidData

_FLOPS_PER_NS = 100_000
_BYTES_PER_NS = 1_500
_LAUNCH_NS = 3_000


@dataclass
class _Record:
    """What the backward pass of one forward op needs to know."""

    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...]
    cost_ns: int
    weight_bytes: int
    workspace: int = 0
    split: bool = False
    passes: bool = False


@dataclass
class _Tape:
    """Builds a forward pass op by op, then its backward pass."""

    whole: bool
    seed: int = 0
    cost: list[int] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    value_op: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    once: list[int] = field(default_factory=list)
    records: list[_Record] = field(default_factory=list)

    def random(self, length: int) -> random.Random:
        """Numbers of the seed."""
        return random.Random(length if self.seed == 0 else f"{length}/{self.seed}")

    def op(self, cost_ns: int, reads: Sequence[int], sizes: Sequence[int], workspace: int = 0) -> list[int]:
        """Append an op and give the values that it makes."""
        made = list(range(len(self.size), len(self.size) + len(sizes)))
        self.value_op += [len(self.cost)] * len(sizes)
        self.size += sizes
        self.cost.append(cost_ns)
        self.reads.append(tuple(sorted(set(reads))))
        self.workspace.append(workspace if self.whole else 0)
        return made

    def roofline(self, flops: int, moved: int) -> int:
        """Cost in ns of so many floating-point operations and bytes moved."""
        return max(flops // _FLOPS_PER_NS, moved // _BYTES_PER_NS) + _LAUNCH_NS

    def layer(
        self,
        inputs: Sequence[int],
        out_bytes: int,
        *,
        flops: int = 0,
        saves: str = "input",
        weight_bytes: int = 0,
        extra_bytes: Sequence[int] = (),
        workspace: int = 0,
        split: bool = False,
        passes: bool = False,
    ) -> int:
        """A forward op; `saves` says what its backward op reads: "input", "output", "both" or "none".

        `extra_bytes` are further outputs that only the backward op reads; `split` gives each input's gradient an op of
        its own also in the whole model; `passes` hands the gradient on to each input without an op.
        """
        moved = out_bytes + sum(self.size[v] for v in inputs) + weight_bytes
        cost = self.roofline(flops, moved)
        made = self.op(cost, inputs, [out_bytes, *(extra_bytes if self.whole else ())], workspace)
        saved = list(inputs) if saves in ("input", "both") else []
        saved += made[:1] if saves in ("output", "both") else []
        saved += made[1:]
        record = _Record(tuple(inputs), made[0], tuple(saved), cost, weight_bytes, workspace, split, passes)
        self.records.append(record)
        return made[0]

    def add(self, a: int, b: int) -> int:
        """A residual sum, whose backward pass needs nothing."""
        return self.layer((a, b), self.size[a], saves="none", passes=True)

    def finish(self, output: int) -> Graph:
        """Append the loss and the backward pass."""
        gradients: dict[int, int] = {}
        if self.whole:
            loss = self.op(self.roofline(0, self.size[output]), [output], [4, self.size[output]])
            self.keep.append(loss[0])
            self.once.append(len(self.cost) - 1)
            backward_from = len(self.cost)
            tangent = self.op(0, [], [4])
            self.once.append(len(self.cost) - 1)
            made = self.op(self.roofline(0, 2 * self.size[output]), [loss[1], tangent[0]], [self.size[output]])
        else:
            loss = self.op(self.roofline(0, self.size[output]), [output], [4])
            backward_from = len(self.cost)
            made = self.op(self.roofline(0, 2 * self.size[output]), [output, loss[0]], [self.size[output]])
        gradients[output] = made[0]
        for record in reversed(self.records):
            if record.output in gradients:
                self._backward(record, gradients)
        return Graph(
            op_cost_ns=tuple(self.cost),
            op_inputs=tuple(self.reads),
            value_op=tuple(self.value_op),
            value_bytes=tuple(self.size),
            op_workspace_bytes=tuple(self.workspace),
            once=tuple(self.once),
            keep=tuple(sorted(self.keep)),
            backward_from=backward_from,
        )

    def _backward(self, record: _Record, gradients: dict[int, int]) -> None:
        gradient = gradients.pop(record.output)
        reads = [gradient, *record.saved]
        targets = record.inputs
        if record.passes:
            for value in targets:
                self._accumulate(gradients, value, gradient)
            return
        sizes = [self.size[v] for v in targets]
        if self.whole and not record.split:
            weights = [record.weight_bytes] if record.weight_bytes else []
            made = self.op(record.cost_ns * (2 if weights else 1), reads, sizes + weights, record.workspace)
            self.keep += made[len(sizes) :]
            for value, part in zip(targets, made, strict=False):
                self._accumulate(gradients, value, part)
            return
        if record.weight_bytes:
            (weight,) = self.op(record.cost_ns, reads, [record.weight_bytes], record.workspace)
            if self.whole:
                self.keep.append(weight)
            reads = [gradient]  # the gradient of a linear op's input needs the weights only
        for value, size in zip(targets, sizes, strict=True):
            (part,) = self.op(record.cost_ns, reads, [size], record.workspace)
            self._accumulate(gradients, value, part)

    def _accumulate(self, gradients: dict[int, int], value: int, part: int) -> None:
        if value in gradients:
            size = self.size[value]
            part = self.op(self.roofline(0, 3 * size), [gradients[value], part], [size])[0]
        gradients[value] = part


def _conv(tape: _Tape, x: int, channels_in: int, channels: int, side: int, kernel: int, batch: int) -> int:
    flops = 2 * batch * side * side * channels * channels_in * kernel * kernel
    weights = 2 * channels * channels_in * kernel * kernel
    out = 2 * batch * side * side * channels
    return tape.layer([x], out, flops=flops, weight_bytes=weights, workspace=out // 4 if kernel > 1 else 0)


def _norm(tape: _Tape, x: int, channels: int) -> int:
    return tape.layer([x], tape.size[x], extra_bytes=(4 * channels, 4 * channels))


def _relu(tape: _Tape, x: int) -> int:
    return tape.layer([x], tape.size[x], saves="output")


def _start(tape: _Tape, size: int) -> int:
    return tape.op(tape.roofline(0, size), [], [size])[0]


def _head(tape: _Tape, x: int, classes: int, batch: int) -> int:
    pooled = tape.layer([x], max(4, tape.size[x] // 49), saves="none")
    flops = tape.size[pooled] * classes
    return tape.layer([pooled], 2 * batch * classes, flops=flops, weight_bytes=max(4, flops // max(1, batch)))


def _vgg(length: int, tape: _Tape) -> Graph:
    batch, side, channels = 32, 224, 64
    x, before, each = _start(tape, 2 * batch * side * side * 3), 3, max(1, length // 5)
    for number in range(length):
        x = _relu(tape, _conv(tape, x, before, channels, side, 3, batch))
        before = channels
        if (number + 1) % each == 0 and side > 7:
            side //= 2
            x = tape.layer([x], tape.size[x] // 4, saves="both")
            channels = min(512, channels * 2)
    return tape.finish(_head(tape, x, 1000, batch))


def _resnet(length: int, tape: _Tape) -> Graph:
    batch, side, width = 64, 56, 64
    x = _start(tape, 2 * batch * 224 * 224 * 3)
    x = _relu(tape, _norm(tape, tape.layer([x], 2 * batch * side * side * width, flops=10**10, weight_bytes=18816), 64))
    channels, each = width, max(1, length // 4)
    for number in range(length):
        if number and number % each == 0 and side > 7:
            side, width = side // 2, width * 2
        y = _relu(tape, _norm(tape, _conv(tape, x, channels, width, side, 1, batch), width))
        y = _relu(tape, _norm(tape, _conv(tape, y, width, width, side, 3, batch), width))
        y = _norm(tape, _conv(tape, y, width, 4 * width, side, 1, batch), 4 * width)
        if channels != 4 * width or tape.size[x] != tape.size[y]:
            x = _norm(tape, _conv(tape, x, channels, 4 * width, side, 1, batch), 4 * width)
        channels = 4 * width
        x = _relu(tape, tape.add(y, x))
    return tape.finish(_head(tape, x, 1000, batch))


def _unet(length: int, tape: _Tape) -> Graph:
    batch, side, width = 8, 32 << min(length, 5), 64
    x, before, skips = _start(tape, 2 * batch * side * side * 3), 3, []
    for level in range(length):
        for _ in range(2):
            x, before = _relu(tape, _norm(tape, _conv(tape, x, before, width, side, 3, batch), width)), width
        skips.append((x, width, side))
        x = tape.layer([x], tape.size[x] // 4, saves="both")
        side, width = max(1, side // 2), width * 2 if level < 4 else width
    for _ in range(2):
        x, before = _relu(tape, _norm(tape, _conv(tape, x, before, width, side, 3, batch), width)), width
    for skip, width_up, side_up in reversed(skips):
        x = tape.layer([x], tape.size[skip], flops=tape.size[skip] * before * 4, weight_bytes=8 * before * width_up)
        x = tape.layer([x, skip], 2 * tape.size[skip], saves="none")
        before = 2 * width_up
        for _ in range(2):
            x = _relu(tape, _norm(tape, _conv(tape, x, before, width_up, side_up, 3, batch), width_up))
            before = width_up
    return tape.finish(_conv(tape, x, before, 2, side_up, 1, batch))


def _densenet(length: int, tape: _Tape) -> Graph:
    batch, side, growth = 64, 56, 32
    x, channels = _start(tape, 2 * batch * side * side * 64), 64
    each = max(1, length // 4)
    for number in range(length):
        y = _relu(tape, _norm(tape, x, channels))
        y = _conv(tape, y, channels, 4 * growth, side, 1, batch)
        y = _conv(tape, _relu(tape, _norm(tape, y, 4 * growth)), 4 * growth, growth, side, 3, batch)
        x = tape.layer([x, y], tape.size[x] + tape.size[y], saves="none")
        channels += growth
        if (number + 1) % each == 0 and side > 7:
            channels //= 2
            x = _conv(tape, _relu(tape, _norm(tape, x, 2 * channels)), 2 * channels, channels, side, 1, batch)
            side //= 2
            x = tape.layer([x], tape.size[x] // 4, saves="none")
    return tape.finish(_head(tape, x, 1000, batch))


def _gpt(length: int, tape: _Tape) -> Graph:
    batch, tokens, width, heads, words = 4, 1024, 1024, 16, 50304
    row = batch * tokens
    hidden = 2 * row * width

    def linear(x: int, fan_in: int, fan_out: int) -> int:
        flops = 2 * row * fan_in * fan_out
        return tape.layer([x], 2 * row * fan_out, flops=flops, weight_bytes=2 * fan_in * fan_out)

    def normed(x: int) -> int:
        return tape.layer([x], hidden, extra_bytes=(4 * row, 4 * row))

    x = tape.layer([_start(tape, 8 * row)], hidden, saves="input", weight_bytes=2 * words * width)
    for _ in range(length):
        qkv = linear(normed(x), width, 3 * width)
        flops, scores = 2 * row * tokens * width, 2 * row * tokens * heads
        if tape.whole:
            y = tape.layer([qkv], hidden, flops=2 * flops, saves="both", extra_bytes=(4 * row * heads,))
            y = tape.layer([y], hidden, extra_bytes=(hidden // 2,), saves="none")  # dropout and its mask
        else:
            s = tape.layer([qkv], scores, flops=flops)
            p = tape.layer([s], scores, saves="output")
            y = tape.layer([p, qkv], hidden, flops=flops, split=True)
        x = tape.add(linear(y, width, width), x)
        y = linear(normed(x), width, 4 * width)
        y = linear(tape.layer([y], 4 * hidden), 4 * width, width)
        x = tape.add(y, x)
    logits = linear(normed(x), width, words)
    return tape.finish(logits)


def _layered(
    rng: random.Random, length: int, more: int = 2, back: int = 4
) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """Costs, sizes and inputs of a random layered graph: layers of one to six ops, some edges far back.

    An op reads one of the layer before, up to `more` of the last `back` layers, and one in ten reads any.
    """
    cost: list[int] = []
    size: list[int] = []
    reads: list[tuple[int, ...]] = []
    layers: list[list[int]] = []
    while len(cost) < length:
        layer = []
        for _ in range(min(rng.randint(1, 6), length - len(cost))):
            read: set[int] = set()
            if layers:
                read.add(rng.choice(layers[-1]))
                for _ in range(rng.randint(0, more)):
                    read.add(rng.choice(rng.choice(layers[-back:])))
                if rng.random() < 0.1:
                    read.add(rng.choice(rng.choice(layers)))
            layer.append(len(cost))
            cost.append(rng.randint(10_000, 1_000_000))
            size.append(rng.randint(1, 100) << 20)
            reads.append(tuple(sorted(read)))
        layers.append(layer)
    return cost, size, reads


def _random(length: int, tape: _Tape) -> Graph:
    cost, size, reads = _layered(tape.random(length), length)
    rng = tape.random(-length)
    for i in range(length):
        made = tape.op(cost[i], reads[i], [size[i]])[0]
        assert made == i
        saved = tuple(v for v in (*reads[i], i) if rng.random() < 0.6) or (i,)
        tape.records.append(_Record(reads[i], i, saved, cost[i], 0))
    used = {v for row in reads for v in row}
    last = [i for i in range(length) if i not in used]
    return tape.finish(last[0] if len(last) == 1 else tape.layer(last, 1 << 20))


def _dag(length: int, tape: _Tape, more: int = 2, back: int = 4) -> Graph:
    cost, size, reads = _layered(tape.random(length), length, more, back)
    return Graph(tuple(cost), tuple(reads), tuple(range(length)), tuple(size))


def _lifted_chain(length: int, tape: _Tape) -> Graph:
    """Ops F^1 … F^L, the tangent δ^L, B^L … B^1; F^l makes a^l and, when kept, the rest of its tape."""
    rng = tape.random(length)
    activation = [rng.randint(8, 64) << 20 for _ in range(length + 1)]
    previous: list[int] = []
    rest: list[int] = []
    for stage in range(length):
        cost = rng.randint(200_000, 4_000_000)
        reads = [] if stage == 0 else [previous[-1]]
        a, tape_value = tape.op(cost, reads, [activation[stage + 1], rng.randint(20, 400) << 20], 1 << 22)
        previous.append(a)
        rest.append(tape_value)
    backward_from = len(tape.cost)
    (gradient,) = tape.op(0, [], [activation[length]])
    for stage in reversed(range(length)):
        reads = [gradient, previous[stage], rest[stage], *([previous[stage - 1]] if stage else [])]
        (gradient,) = tape.op(2 * tape.cost[stage], reads, [activation[stage]], 1 << 22)
    return Graph(
        op_cost_ns=tuple(tape.cost),
        op_inputs=tuple(tape.reads),
        value_op=tuple(tape.value_op),
        value_bytes=tuple(tape.size),
        op_workspace_bytes=tuple(tape.workspace),
        optional=tuple(rest),
        once=(backward_from,),
        backward_from=backward_from,
    )


_FAMILIES: dict[str, Callable[[int, _Tape], Graph]] = {
    "vgg": _vgg,
    "resnet": _resnet,
    "unet": _unet,
    "densenet": _densenet,
    "gpt": _gpt,
    "random": _random,
    "dag": _dag,
    "dense": partial(_dag, more=7, back=12),
    "tape": _lifted_chain,
}

_RANDOM = ("random", "dag", "dense", "tape")

NAMES = (
    *("vgg-13", "vgg-13-whole", "unet-4", "unet-4-whole", "unet-2", "tape-16", "tape-64", "dag-100", "dag-250"),
    *("gpt-4", "gpt-4-whole", "gpt-12", "gpt-12-whole", "resnet-16", "resnet-16-whole", "densenet-24"),
    *("densenet-58", "densenet-58-whole", "random-50", "random-125", "random-250", "random-500"),
    *("gpt-24", "gpt-24-whole", "resnet-33", "resnet-50-whole", "gpt-96-whole", "gpt-144", "gpt-300", "gpt-430-whole"),
)
"""The instances of the benchmark, from tens of ops to ten thousand; any other length can be had as well."""


def instance(name: str) -> Graph:
    """The generated graph of that name: `family-length`, with `-whole` for the whole model, `-s3` for another seed.

    Raises:
        InvalidData: no such family, or a length that is not a positive integer.
    """
    family, _, rest = name.partition("-")
    length, _, kind = rest.partition("-")
    seed = int(kind[1:]) if kind[:1] == "s" and kind[1:].isdecimal() and family in _RANDOM else 0
    known = family in _FAMILIES and length.isdecimal() and int(length) > 0
    if not known or not (kind in ("", "whole") or seed):
        named = ", ".join(_FAMILIES)
        raise InvalidData(f"no instance {name!r}: FAMILY-LENGTH[-whole or -sSEED], FAMILY one of {named}")
    return _FAMILIES[family](int(length), _Tape(kind == "whole" or family == "tape", seed))
