"""The training steps behind the two published tables, as their authors ran them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from parts.inplace_abn import with_inplace_abn
from torch import nn

from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.kernels.workspaces import CudaWorkspaces
from batchfinder.simulation.trace.alignment import align
from batchfinder.simulation.trace.trace import GeneralTrace, Kind, Trace
from batchfinder.simulation.tracing.fake import fake_copy, fake_cuda
from batchfinder.simulation.tracing.tracker import StorageTracker


@dataclass(frozen=True)
class TracedModel:
    """The trace of a model's steps, and the number of its parameters."""

    trace: GeneralTrace
    parameters: int


@dataclass(frozen=True)
class Recipe:
    """How the steps of a table were run.

    Attributes:
        capability: of the table's GPU.
        half: fp16 autocast around forward and backward.
        keep_gradients: ``zero_grad(set_to_none=False)``.
        foreach: the optimizer's flag.
        prefetch: batches resident beside the one in use.
        fused_attention: whether that PyTorch had it.
        torch_version: of that PyTorch.
        weight_decay: of the optimizer.
        inplace_abn: whether that timm built TResNet on this package; timm 0.9 gave it up.
    """

    capability: ComputeCapability
    half: bool
    keep_gradients: bool
    foreach: bool
    prefetch: bool
    fused_attention: bool
    torch_version: tuple[int, int]
    weight_decay: float
    inplace_abn: bool


RTX_3090 = Recipe(
    (8, 6),
    half=True,
    keep_gradients=True,
    foreach=False,
    prefetch=False,
    fused_attention=False,
    torch_version=(1, 12),
    weight_decay=0.0,
    inplace_abn=True,
)
A100 = Recipe(
    (8, 0),
    half=False,
    keep_gradients=False,
    foreach=True,
    prefetch=True,
    fused_attention=True,
    torch_version=(2, 3),
    weight_decay=2e-5,
    inplace_abn=False,
)


def build(name: str, image_size: int | None) -> nn.Module:
    """The timm model on "meta"; some take their image size as an argument, others do not."""
    import timm

    with torch.device("meta"):
        if image_size is not None:
            try:
                return timm.create_model(name, img_size=image_size)
            except TypeError:
                pass
        return timm.create_model(name)


def trace_model(
    name: str, image_size: int | None, layout: str, recipe: Recipe, sizes: tuple[int, int] = (4, 8)
) -> TracedModel:
    """The trace of a timm model's steps at every batch size.

    Args:
        name: of the model.
        image_size: height and width; None: the model's own.
        layout: ``"nchw"`` or ``"nhwc"``.
        recipe: of the steps.
        sizes: the two batch sizes that are traced.

    Raises:
        NotGeneralError: they do not tell the others.
        Exception: what the model raises.
    """
    import timm

    timm.layers.set_fused_attn(recipe.fused_attention)
    model = build(name, image_size).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if recipe.inplace_abn and name.startswith("tresnet"):
        model = with_inplace_abn(model)
    shape = (3, image_size, image_size) if image_size else model.pretrained_cfg["input_size"]
    small, large = (_trace(model, shape, layout, recipe, size) for size in sizes)
    return TracedModel(align(small, large), parameters)


def _trace(model: nn.Module, shape: Any, layout: str, recipe: Recipe, batch_size: int) -> Trace:
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    model.to(memory_format=memory_format)
    with fake_cuda(recipe.capability, torch_version=recipe.torch_version) as mode:
        model = fake_copy(model, mode, model)
        # Like timm's, without weight decay for biases and normalizations.
        groups = [
            {
                "params": [p for p in model.parameters() if p.dim() > 1],
                "weight_decay": recipe.weight_decay,
            },
            {"params": [p for p in model.parameters() if p.dim() <= 1]},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.SGD(
            groups, lr=0.1, momentum=0.9, nesterov=True, foreach=recipe.foreach
        )
        images = torch.randn(batch_size, *shape).contiguous(memory_format=memory_format)
        labels = torch.zeros(batch_size, dtype=torch.long)
        workspaces = CudaWorkspaces(
            recipe.capability, set(), benchmark=True, torch_version=recipe.torch_version
        )
        tracker = StorageTracker(batch_size, model, workspaces)
        with tracker:
            for tensor in [*model.parameters(), *model.buffers()]:
                tracker.track(tensor, Kind.PARAMETER)
            inputs = [images, labels]
            if recipe.prefetch:
                # The loader brings the next batch, as bytes and as numbers, while this one runs.
                inputs += [torch.empty_like(images), torch.empty_like(images, dtype=torch.uint8)]
            for tensor in inputs:
                tracker.track(tensor, Kind.INPUT)
            for _ in range(2):
                tracker.begin_step()
                optimizer.zero_grad(set_to_none=not recipe.keep_gradients)
                with torch.autocast("cpu", torch.float16, enabled=recipe.half):
                    output = model(images)
                    if isinstance(output, (tuple, list)):
                        output = output[0]
                    loss = F.cross_entropy(output, labels)
                    loss.backward()
                optimizer.step()
                del output, loss
        return tracker.trace
