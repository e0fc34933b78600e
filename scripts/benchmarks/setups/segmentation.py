"""Segmentation models of torchvision, with their auxiliary output."""

from __future__ import annotations

from typing import Any

import setup_loop
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from torch import Tensor, nn

CLASSES = 21
Sample = tuple[Tensor, Tensor]


def target(model: str = "fcn_resnet50", image_size: int = 256) -> Any:
    """Return the model, one batch and the loss."""
    from batchfinder import TrainingSetup

    return TrainingSetup(
        build(model), make_batch(2, image_size), loss_fn=loss_of, optimizer=momentum_of
    )


def build(model: str = "fcn_resnet50", image_size: int = 256) -> nn.Module:
    """Return the model without weights."""
    built: nn.Module = torchvision.models.get_model(
        model, weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )
    return built


def make_batch(batch_size: int, image_size: int = 256) -> Sample:
    """Return images and the class of each pixel."""
    images = torch.zeros(batch_size, 3, image_size, image_size)
    return images, torch.zeros(batch_size, image_size, image_size, dtype=torch.long)


def loss_of(output: dict[str, Tensor], batch: Sample) -> Tensor:
    """Return the loss of both outputs."""
    _, classes = batch
    return F.cross_entropy(output["out"], classes) + 0.5 * F.cross_entropy(output["aux"], classes)


def momentum_of(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def start(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the device, and its optimizer."""
    model = build(**arguments).to(setup_loop.device).train()
    return model, momentum_of(model.parameters())


if __name__ == "__main__":
    device = setup_loop.device
    image_size = setup_loop.arguments.get("image_size", 256)
    model, optimizer = setup_loop.kept(start)
    loader = (make_batch(setup_loop.batch_size, image_size) for _ in range(setup_loop.steps))
    for images, classes in loader:
        images, classes = images.to(device), classes.to(device)
        with setup_loop.autocast():
            output = model(images)
            loss = F.cross_entropy(output["out"], classes)
            loss = loss + 0.5 * F.cross_entropy(output["aux"], classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
