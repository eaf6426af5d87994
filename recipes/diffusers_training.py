"""diffusers: its unconditional training loop with an EMA of weights, and LoRA on the attention of a U-Net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

from .training import Training

VARIANTS = ("unconditional", "lora")


def train(training: Training, variant: str) -> None:
    model = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    if variant == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    average, noises = EMAModel(trained, decay=0.99), DDPMScheduler(num_train_timesteps=100)
    training.enable(model)
    optimizer = torch.optim.AdamW(trained, 1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        rows, size = 3 if step % 10 == 9 else 4, {2: 24, 3: 20}.get(step % 4, 16)
        clean = torch.rand(rows, 3, size, size, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        when = torch.randint(0, 100, (rows,), generator=generator)
        loss = F.mse_loss(model(noises.add_noise(clean, noise, when), when).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(trained)
        training.step(loss)
    training.end("model", model, optimizer)
