"""The networks of the Checkmate paper's figures, layer by layer, and the training graphs that follow from them.

A training graph has one op per layer, the loss, and one backward op per layer in reverse: the backward op of a layer
makes the gradient of the layer's output, as large as that output, and reads it, the outputs of the layers that use it,
and their gradients (Checkmate, Section 4.1 and Figure 2). A backward op costs twice its layer. Tensors hold 32-bit
floats. Fixed bytes are the input batch and twice the parameters (equation 2).

Costs are FLOPs, a multiplication and an addition being two, or the roofline of an NVIDIA V100 in ns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from remat_ir import Graph, graph_of

Shape: TypeAlias = tuple[int, ...]
"""Height, width, channels; or features alone."""

INPUT = -1
FLOAT = 4
CLASSES = 19
"""What the segmentation networks tell apart."""

_V100_FLOPS_PER_NS = 15_700
_V100_BYTES_PER_NS = 900
_LAUNCH_NS = 5_000


@dataclass(frozen=True)
class Layer:
    """One layer: whom it reads, what it makes, and what that takes per sample."""

    name: str
    reads: tuple[int, ...]
    shape: Shape
    flops: int = 0
    parameters: int = 0


class Network:
    """A stack of layers under construction; each method appends one and gives its index."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers: list[Layer] = []

    def out(self, layer: int) -> Shape:
        """The shape of a layer's output, or of the input."""
        return self.shape if layer == INPUT else self.layers[layer].shape

    @property
    def last(self) -> int:
        """The index of the latest layer, INPUT before the first one."""
        return len(self.layers) - 1

    def add(self, name: str, reads: Sequence[int], shape: Shape, flops: int = 0, parameters: int = 0) -> int:
        """Append any layer."""
        self.layers.append(Layer(f"{name}_{len(self.layers)}", tuple(reads), shape, flops, parameters))
        return self.last

    def conv(
        self,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        valid: bool = False,
        relu: bool = False,
        bias: bool = True,
        at: int | None = None,
    ) -> int:
        """A convolution, its activation in the same layer if `relu`."""
        source = self.last if at is None else at
        height, width, depth = self.out(source)
        if valid:
            size = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        else:
            size = -(-height // stride), -(-width // stride)
        shape = (*size, channels)
        flops = (2 * kernel * kernel * depth + int(relu)) * prod(shape)
        return self.add("conv", [source], shape, flops, (kernel * kernel * depth + int(bias)) * channels)

    def depthwise(self, kernel: int, *, stride: int = 1, valid: bool = False) -> int:
        """A depthwise convolution without bias."""
        height, width, depth = self.out(self.last)
        size = ((height - kernel) // stride + 1, (width - kernel) // stride + 1) if valid else (height, width)
        shape = (*size, depth)
        return self.add("depthwise", [self.last], shape, 2 * kernel * kernel * prod(shape), kernel * kernel * depth)

    def upconv(self, channels: int, kernel: int, stride: int) -> int:
        """A transposed convolution without bias or padding."""
        height, width, depth = self.out(self.last)
        shape = ((height - 1) * stride + kernel, (width - 1) * stride + kernel, channels)
        flops = 2 * kernel * kernel * depth * channels * height * width
        return self.add("upconv", [self.last], shape, flops, kernel * kernel * depth * channels)

    def dense(self, features: int, *, relu: bool = False) -> int:
        """A fully connected layer with bias."""
        (depth,) = self.out(self.last)
        return self.add("dense", [self.last], (features,), (2 * depth + int(relu)) * features, (depth + 1) * features)

    def norm(self, at: int | None = None) -> int:
        """Batch normalisation: scale, shift and two running statistics a channel."""
        source = self.last if at is None else at
        shape = self.out(source)
        return self.add("norm", [source], shape, 4 * prod(shape), 4 * shape[-1])

    def each(self, name: str, flops: int = 1) -> int:
        """An op on each element."""
        shape = self.out(self.last)
        return self.add(name, [self.last], shape, flops * prod(shape))

    def pool(self, kernel: int, stride: int) -> int:
        """Pooling without padding."""
        height, width, depth = self.out(self.last)
        shape = ((height - kernel) // stride + 1, (width - kernel) // stride + 1, depth)
        return self.add("pool", [self.last], shape, kernel * kernel * prod(shape))

    def pad(self, rows: int, columns: int) -> int:
        """Zeros around: so many rows and columns more, or fewer where negative."""
        height, width, depth = self.out(self.last)
        return self.add("pad" if rows + columns > 0 else "crop", [self.last], (height + rows, width + columns, depth))

    def mean(self) -> int:
        """The mean over all places."""
        shape = self.out(self.last)
        return self.add("mean", [self.last], (shape[-1],), prod(shape))

    def reshape(self, *shape: int) -> int:
        """Another shape."""
        return self.add("reshape", [self.last], shape)

    def upsample(self) -> int:
        """Twice as high and wide."""
        height, width, depth = self.out(self.last)
        shape = (2 * height, 2 * width, depth)
        return self.add("upsample", [self.last], shape, prod(shape))

    def join(self, one: int, other: int) -> int:
        """Two outputs side by side in one tensor."""
        height, width, depth = self.out(one)
        return self.add("join", [one, other], (height, width, depth + self.out(other)[-1]))

    def sum(self, one: int, other: int) -> int:
        """The sum of two outputs."""
        return self.add("sum", [one, other], self.out(one), prod(self.out(one)))

    @property
    def parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(layer.parameters for layer in self.layers)


def training_graph(network: Network, batch: int, costs: Literal["flops", "v100"] = "flops") -> Graph:
    """The training graph of a network at a batch size; ops are layers, loss, backward layers in reverse."""
    layers = network.layers
    users: list[list[int]] = [[] for _ in layers]
    for i, layer in enumerate(layers):
        for source in layer.reads:
            if source != INPUT:
                users[source].append(i)
    loss, last = len(layers), len(layers) - 1
    size = [FLOAT * batch * prod(layer.shape) for layer in layers]
    cost = []
    for i, layer in enumerate(layers):
        flops = batch * layer.flops
        moved = size[i] + FLOAT * (layer.parameters + batch * sum(prod(network.out(source)) for source in layer.reads))
        cost.append(flops if costs == "flops" else _roofline(flops, moved))
    logits = batch * prod(layers[last].shape)
    cost.append(logits if costs == "flops" else _roofline(logits, FLOAT * logits))
    size.append(FLOAT * batch)
    inputs = [[source for source in layer.reads if source != INPUT] for layer in layers] + [[last]]
    names = [layer.name for layer in layers] + ["loss"]
    for i in reversed(range(len(layers))):
        gradients = [2 * loss - user for user in users[i]]
        inputs.append(sorted({i, *users[i], *gradients, *([loss] if i == last else [])}))
        cost.append(2 * cost[i])
        size.append(size[i])
        names.append(f"{layers[i].name}_backward")
    return graph_of(
        cost,
        size,
        inputs,
        backward_from=loss + 1,
        fixed_bytes=FLOAT * (2 * network.parameters + batch * prod(network.shape)),
        op_names=tuple(names),
    )


def _roofline(flops: int, moved: int) -> int:
    return max(flops // _V100_FLOPS_PER_NS, moved // _V100_BYTES_PER_NS) + _LAUNCH_NS


def vgg(depth: Literal[16, 19], shape: Shape = (224, 224, 3)) -> Network:
    """VGG16 or VGG19 (Simonyan and Zisserman, 2014)."""
    net = _vgg_body(shape, (2, 2, 3, 3, 3) if depth == 16 else (2, 2, 4, 4, 4))[0]
    net.reshape(prod(net.out(net.last)))
    net.dense(4096, relu=True)
    net.dense(4096, relu=True)
    net.dense(1000)
    return net


def _vgg_body(shape: Shape, counts: Sequence[int]) -> tuple[Network, list[int]]:
    """VGG's convolutions, and the pooling layers that close its blocks."""
    net, pools = Network(shape), []
    for block, count in enumerate(counts):
        for _ in range(count):
            net.conv((64, 128, 256, 512, 512)[block], 3, relu=True)
        pools.append(net.pool(2, 2))
    return net, pools


def mobilenet(shape: Shape = (224, 224, 3)) -> Network:
    """MobileNet v1 (Howard et al., 2017), padding before strided convolutions as layers of their own."""
    net = Network(shape)
    net.pad(1, 1)
    net.conv(32, 3, stride=2, valid=True, bias=False)
    net.norm()
    net.each("relu")
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    channels = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    for stride, width in zip(strides, channels, strict=True):
        if stride == 2:
            net.pad(1, 1)
        net.depthwise(3, stride=stride, valid=stride == 2)
        net.norm()
        net.each("relu")
        net.conv(width, 1, bias=False)
        net.norm()
        net.each("relu")
    net.mean()
    net.reshape(1, 1, 1024)
    net.each("dropout")
    net.conv(1000, 1)
    net.reshape(1000)
    net.each("softmax", 5)
    return net


def resnet50(shape: Shape = (224, 224, 3)) -> Network:
    """ResNet50 (He et al., 2016)."""
    net = Network(shape)
    net.pad(6, 6)
    net.conv(64, 7, stride=2, valid=True)
    net.norm()
    net.each("relu")
    net.pad(2, 2)
    net.pool(3, 2)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            start = net.last
            net.conv(width, 1, stride=stride)
            net.norm()
            net.each("relu")
            net.conv(width, 3)
            net.norm()
            inner = net.each("relu")
            if block:
                shortcut = start
                net.conv(4 * width, 1)
                net.norm()
            else:
                projected = net.conv(4 * width, 1, stride=stride, at=start)
                expanded = net.conv(4 * width, 1, at=inner)
                shortcut = net.norm(projected)
                net.norm(expanded)
            net.sum(shortcut, net.last)
            net.each("relu")
    net.mean()
    net.dense(1000)
    return net


def unet(shape: Shape = (416, 608, 3)) -> Network:
    """U-Net (Ronneberger et al., 2015) with VGG16's first four blocks as the way down."""
    net, pools = _vgg_body(shape, (2, 2, 3, 3))
    for width, skip in zip((512, 256, 128, 64), (*reversed(pools[:-1]), None), strict=True):
        net.pad(2, 2)
        net.conv(width, 3, valid=True)
        net.norm()
        if skip is not None:
            net.join(net.upsample(), skip)
    return _segments(net)


def segnet(shape: Shape = (416, 608, 3)) -> Network:
    """SegNet (Badrinarayanan et al., 2017) with one convolution a level."""
    net = Network(shape)
    for width in (64, 128, 256, 256):
        net.pad(2, 2)
        net.conv(width, 3, valid=True)
        net.norm()
        net.each("relu")
        net.pool(2, 2)
    for level, width in enumerate((512, 256, 128, 64)):
        if level:
            net.upsample()
        net.pad(2, 2)
        net.conv(width, 3, valid=True)
        net.norm()
    return _segments(net)


def fcn8(shape: Shape = (416, 608, 3)) -> Network:
    """FCN-8s (Long et al., 2015) on VGG16."""
    net, pools = _vgg_body(shape, (2, 2, 3, 3, 3))
    net.conv(4096, 7, relu=True)
    net.each("dropout")
    net.conv(4096, 1, relu=True)
    net.each("dropout")
    net.conv(CLASSES, 1)
    for pool in (pools[3], pools[2]):
        height, width, _ = net.out(pool)
        net.upconv(CLASSES, 4, 2)
        net.pad(0, width - net.out(net.last)[1])
        if pool == pools[3]:
            upper = net.pad(height - net.out(net.last)[0], 0)
            score = net.conv(CLASSES, 1, at=pool)
        else:
            score = net.conv(CLASSES, 1, at=pool)
            upper = net.add("crop", [score - 1], (height, width, CLASSES))
        net.sum(upper, score)
    net.upconv(CLASSES, 16, 8)
    height, width, _ = net.out(net.last)
    net.reshape(height * width, CLASSES)
    net.each("softmax", 5)
    return net


def _segments(net: Network) -> Network:
    """A class for each place: scores, and their softmax over places in a row."""
    net.conv(CLASSES, 3)
    height, width, _ = net.out(net.last)
    net.reshape(height * width, CLASSES)
    net.each("softmax", 5)
    return net


ARCHITECTURES: dict[str, Callable[[], Network]] = {
    "vgg16": lambda: vgg(16),
    "vgg19": lambda: vgg(19),
    "mobilenet": mobilenet,
    "resnet50": resnet50,
    "unet": unet,
    "fcn8": fcn8,
    "segnet": segnet,
}
