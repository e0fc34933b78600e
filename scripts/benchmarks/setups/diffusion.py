"""U-Nets of diffusers, trained to predict the noise."""

from __future__ import annotations

from typing import Any

import setup_loop
import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn

Batch = dict[str, Tensor]


def target(model: str = "latent") -> Any:
    """Return the model, one batch and the loss."""
    from batchfinder import TrainingSetup

    return TrainingSetup(BUILD[model](), MAKE_BATCH[model](2), loss_fn=loss_of)


def latent() -> nn.Module:
    """Return the kind of U-Net of Stable Diffusion 1.5, with one layer a block."""
    unet = UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(160, 320, 640, 640),
        layers_per_block=1,
        cross_attention_dim=768,
    )
    return _WithNoise(unet)


def pixels() -> nn.Module:
    """Return the kind of U-Net that makes small images."""
    unet = UNet2DModel(sample_size=64, block_out_channels=(64, 128, 256, 256))
    return _WithNoise(unet)


class _WithNoise(nn.Module):
    """A U-Net that is called with all of a batch, the noise included."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noise: Tensor, **batch: Tensor) -> Any:
        """Return what the U-Net does."""
        return self.unet(**batch)


def make_latents(batch_size: int) -> Batch:
    """Return noisy latents, their times and the texts beside them."""
    return {
        "noise": torch.zeros(batch_size, 4, 64, 64),
        "sample": torch.zeros(batch_size, 4, 64, 64),
        "timestep": torch.zeros(batch_size, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(batch_size, 77, 768),
    }


def make_images(batch_size: int) -> Batch:
    """Return noisy images and their times."""
    return {
        "noise": torch.zeros(batch_size, 3, 64, 64),
        "sample": torch.zeros(batch_size, 3, 64, 64),
        "timestep": torch.zeros(batch_size, dtype=torch.long),
    }


def loss_of(output: Any, batch: Batch) -> Tensor:
    """Return the mean squared error of the noise."""
    return F.mse_loss(output.sample.float(), batch["noise"])


BUILD: dict[str, Any] = {"latent": latent, "pixels": pixels}
MAKE_BATCH = {"latent": make_latents, "pixels": make_images}


def start(model: str = "latent") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the device, and its optimizer."""
    unet = BUILD[model]().to(setup_loop.device).train()
    return unet, torch.optim.AdamW(unet.parameters(), lr=1e-4)


if __name__ == "__main__":
    device = setup_loop.device
    model, optimizer = setup_loop.kept(start)
    make_batch = MAKE_BATCH[setup_loop.arguments.get("model", "latent")]
    for batch in (make_batch(setup_loop.batch_size) for _ in range(setup_loop.steps)):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with setup_loop.autocast():
            prediction = model(**batch)
            loss = F.mse_loss(prediction.sample.float(), batch["noise"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
