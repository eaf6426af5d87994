"""One case of the acceptance test in a process of its own: its samples, or its error, as JSON in a file."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAND_IN = "REMAT_GPU_STAND_IN"
"""Set: the cases run on the stand-in, in its sizes."""


def samples(name: str) -> dict[str, Any]:
    """What a case measures; `remat.cli.doctor` has the names."""
    import torch

    from gpu import parts, ranks
    from gpu.subjects import GPU, SMALL, subject

    size, device = (SMALL if os.environ.get(STAND_IN) else GPU), torch.device("cuda:0")
    kind, _, what = name.partition(" ")
    if kind == "record":
        return parts.record(ROOT)
    if kind == "ranks":
        return ranks.launch(what, "cpu" if os.environ.get(STAND_IN) else "cuda")
    if kind == "transfers":
        return parts.transfers(device, size.width * 2**10, 2 * size.width)
    exact = kind in ("bits", "inductor")
    torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = exact, "benchmark" in what
    torch.set_float32_matmul_precision("high" if what == "tf32" else "highest")
    torch.backends.cudnn.conv.fp32_precision = "tf32" if what == "tf32" else "ieee"
    kernels = what.removesuffix(" attention")
    if kernels != what:
        backends: Any = torch.backends.cuda
        backends.enable_flash_sdp(kernels == "flash")
        backends.enable_mem_efficient_sdp(kernels == "efficient")
        backends.enable_math_sdp(kernels == "math")
        backends.enable_cudnn_sdp(False)
    half = what in ("bf16", "flash attention")
    if what == "second device":
        device = torch.device("cuda:1")
    model = {"convolutions": "convolutions", "convolutions with benchmark": "convolutions"}.get(what, "attention")
    model = {"lstm dropout": "recurrent", "layer norm": "normalized"}.get(what, model)
    made = subject(model, size, device, torch.bfloat16 if half else torch.float32)
    run = {
        "bits": parts.bits,
        "inductor": parts.inductor,
        "spread": parts.spread,
        "memory": parts.memory,
        "limit": parts.limit,
        "time": parts.seconds,
    }
    return run[kind](made)


def main(name: str, into: str) -> int:
    """Run a case and write what it found."""
    sys.path[:0] = [str(ROOT / part) for part in ("tests", "client", "solver", "service", "")]
    if os.environ.get(STAND_IN):
        from standin import device

        device.install()
    began = time.monotonic()
    found: dict[str, Any] = {"name": name}
    try:
        found["samples"] = samples(name)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        found["traceback"] = traceback.format_exc()[-8000:]
    found["seconds"] = round(time.monotonic() - began, 2)
    Path(into).write_text(json.dumps(found))
    return int("error" in found)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # on the stand-in, torch's own clean-up at exit looks for a CUDA runtime
