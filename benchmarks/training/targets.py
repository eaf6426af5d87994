"""Models that people train, planned for a device that is not here: seconds of each phase, peaks, overhead as a range.

`python -m benchmarks.training.targets` runs `remat plan` on each of them in a process of its own and prints a table.
`--device`, `--budget` and `--optimizer` are those of `remat plan`; `--json` writes what the commands said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

BFLOAT16 = torch.bfloat16
HEAD = (
    "model",
    "batch",
    "ops",
    "capture",
    "price",
    "solve",
    "plain",
    "by the plan",
    "reserved",
    "time",
    "if classes are off by 20 %",
)


def gpt2_medium(batch: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2 medium, sequences of 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=1024)
    return GPT2LMHeadModel(config).to(BFLOAT16), _tokens(batch, 1024)


def llama3_8b(batch: int = 1) -> tuple[nn.Module, dict[str, Any]]:
    """The shape of Llama-3-8B, sequences of 4,096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).to(BFLOAT16), _tokens(batch, 4096)


def sdxl_unet(batch: int = 8) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The U-Net of Stable Diffusion XL, latents of 128 × 128."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    added = {"text_embeds": torch.zeros(batch, 1280, dtype=BFLOAT16), "time_ids": torch.zeros(batch, 6, dtype=BFLOAT16)}
    latents, steps = torch.zeros(batch, 4, 128, 128, dtype=BFLOAT16), torch.zeros(batch, dtype=torch.long)
    text = torch.zeros(batch, 77, 2048, dtype=BFLOAT16)
    return unet.to(BFLOAT16), (latents, steps, text), {"added_cond_kwargs": added, "return_dict": False}


def vit_h(batch: int = 64) -> tuple[nn.Module, dict[str, Any]]:
    """ViT-H/14, images of 224 × 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        num_labels=1000,
        problem_type="single_label_classification",
    )
    images = torch.zeros(batch, 3, 224, 224, dtype=BFLOAT16)
    return ViTForImageClassification(config).to(BFLOAT16), {"pixel_values": images, "labels": torch.zeros(batch).long()}


MODELS = {"GPT-2 medium": gpt2_medium, "Llama-3-8B": llama3_8b, "SDXL U-Net": sdxl_unet, "ViT-H/14": vit_h}


def _tokens(batch: int, length: int) -> dict[str, Any]:
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def planned(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """What `remat plan` says of a model.

    Raises:
        RuntimeError: it fails; the message is its own.
    """
    model = f"{__name__ if __name__ != '__main__' else 'benchmarks.training.targets'}:{MODELS[name].__name__}"
    options = ["--device", given.device, "--budget", given.budget, "--optimizer", given.optimizer, "--local", "--json"]
    command = [sys.executable, "-m", "remat", "plan", model, *options, "-t", str(given.time_limit), "-g", "0.005"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{name}: {ran.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(ran.stdout))


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A model's row of the table."""
    seconds, (low, high) = found["seconds"], found["overhead_range"]
    batch = MODELS[name].__defaults__[0]
    return [
        name,
        str(batch),
        str(found["ops"]),
        *(f"{seconds[phase]:.1f} s" for phase in ("capture", "price", "solve")),
        *(f"{found[key] / 2**30:.1f} GiB" for key in ("plain_peak_bytes", "peak_bytes", "reserved_bytes")),
        f"{100 * found['answer']['overhead']:+.1f} %",
        f"{100 * low:.1f} to {100 * high:.1f} %",
    ]


def main(argv: list[str] | None = None) -> None:
    """Plan each model and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.targets")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="write everything here")
    given = parser.parse_args(argv)
    found: dict[str, Any] = {}
    print(f"| {' | '.join(HEAD)} |\n| {' | '.join('---' for _ in HEAD)} |", flush=True)
    for name in given.models.split(","):
        found[name] = planned(name, given)
        print(f"| {' | '.join(row(name, found[name]))} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
