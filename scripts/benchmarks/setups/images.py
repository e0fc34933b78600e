"""Image classifiers of timm and torchvision, on images of ImageNet's size."""

from __future__ import annotations

import setup_loop
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Sample = tuple[Tensor, Tensor]


def target(model: str = "timm/resnet18", image_size: int = 224) -> tuple[nn.Module, Sample]:
    """Return the model and one batch."""
    library, _, name = model.partition("/")
    if library == "timm":
        import timm

        built: nn.Module = timm.create_model(name)
    else:
        import torchvision

        built = torchvision.models.get_model(name)
    return built, make_batch(2, image_size)


def make_batch(batch_size: int, image_size: int = 224) -> Sample:
    """Return images and labels."""
    images = torch.zeros(batch_size, 3, image_size, image_size)
    return images, torch.zeros(batch_size, dtype=torch.long)


if __name__ == "__main__":
    device = setup_loop.device
    image_size = setup_loop.arguments.get("image_size", 224)
    model, optimizer = setup_loop.with_adamw(target)
    loader = (make_batch(setup_loop.batch_size, image_size) for _ in range(setup_loop.steps))
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with setup_loop.autocast():
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
