"""Trainers as people write them, each trained by `aot_eager` and by plans from one seed: `make recipes`."""

import torch

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:  # built for CUDA: with a torch for the CPU it lacks operators of its own, which its import names
    OF_TORCHVISION = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        OF_TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
