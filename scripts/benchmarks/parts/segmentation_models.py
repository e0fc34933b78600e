"""The networks behind MMSegmentation's tables of V100 memory, as its configurations build them.

Names: R-50 has three small convolutions for a stem, R-50b a large one. D8 keeps an eighth of the
image's size, D16 a sixteenth. https://github.com/open-mmlab/mmsegmentation/tree/main/configs
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor, nn

CLASSES, VESSEL_CLASSES = 19, 2  # of Cityscapes; of images of the retina
IGNORED = 255


def conv(inputs: int, outputs: int, size: int = 3, **options: int) -> nn.Sequential:
    """A convolution without bias, with its normalization and ReLU."""
    options.setdefault("padding", size // 2 * options.get("dilation", 1))
    layer = nn.Conv2d(inputs, outputs, size, bias=False, **options)  # type: ignore[arg-type]
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Block(nn.Module):
    """A residual block, of two convolutions or a bottleneck of three."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int, expansion: int):
        super().__init__()
        outputs = width * expansion
        spread = {"stride": stride, "dilation": dilation}
        if expansion > 1:
            layers = [conv(inputs, width, 1), conv(width, width, **spread), conv(width, outputs, 1)]
        else:
            layers = [conv(inputs, width, **spread), conv(width, width)]
        del layers[-1][2]  # the last ReLU comes after the sum
        self.layers = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = conv(inputs, outputs, 1, stride=stride)[:2]

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        y = self.layers(x)
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """The backbone; returns what its last two stages return."""

    def __init__(self, depth: int, is_deep: bool, strides: Sequence[int], dilations: Sequence[int]):
        super().__init__()
        blocks = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]
        expansion = 1 if depth == 18 else 4
        deep = [conv(3, 32, stride=2), conv(32, 32), conv(32, 64)]
        self.stem = nn.Sequential(*(deep if is_deep else [conv(3, 64, 7, stride=2)]))
        inputs, stages = 64, []
        for at, count in enumerate(blocks):
            width, layers = 64 << at, []
            for block in range(count):
                first = block == 0
                # The first block of a dilated stage has half of its dilation.
                dilation = max(1, dilations[at] // 2) if first else dilations[at]
                stride = strides[at] if first else 1
                layers.append(Block(inputs, width, stride, dilation, expansion))
                inputs = width * expansion
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.channels = inputs

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the last two feature maps."""
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps[-2:]


class UNet(nn.Module):
    """Five stages of two convolutions, and back by interpolation; returns the last two maps."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 << at for at in range(5)]
        self.down = nn.ModuleList(
            nn.Sequential(conv(inputs, width), conv(width, width))
            for inputs, width in zip([3, *widths], widths, strict=False)
        )
        self.shrink = nn.ModuleList(conv(2 * width, width, 1) for width in widths[:-1])
        self.up = nn.ModuleList(
            nn.Sequential(conv(2 * width, width), conv(width, width)) for width in widths[:-1]
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the last two feature maps."""
        skips = []
        for at, stage in enumerate(self.down):
            x = stage(x if at == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        maps = [x]
        for at in (3, 2, 1, 0):
            x = self.shrink[at](F.interpolate(x, scale_factor=2, mode="bilinear"))
            x = self.up[at](torch.cat([skips[at], x], dim=1))
            maps.append(x)
        return maps[-2:]


class FcnHead(nn.Module):
    """Convolutions and the classes; with more than one, their input is seen once more."""

    def __init__(self, inputs: int, width: int, count: int, classes: int, dilation: int = 1):
        super().__init__()
        widths = [inputs, *[width] * count]
        self.layers = nn.Sequential(*(conv(a, b, dilation=dilation) for a, b in pairwise(widths)))
        self.again = conv(inputs + width, width) if count > 1 else None
        self.classes = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        y = self.layers(x)
        if self.again is not None:
            y = self.again(torch.cat([x, y], dim=1))
        return self.classes(y)  # type: ignore[no-any-return]


class PyramidHead(nn.Module):
    """PSPNet's: pooled to a few sizes, or DeepLabV3's: dilated by a few rates."""

    def __init__(self, inputs: int, width: int, classes: int, *, is_dilated: bool):
        super().__init__()
        pooled = [1] if is_dilated else [1, 2, 3, 6]
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), conv(inputs, width, 1)) for size in pooled
        )
        self.dilated = nn.ModuleList()
        if is_dilated:
            self.dilated.append(conv(inputs, width, 1))
            self.dilated.extend(conv(inputs, width, dilation=rate) for rate in (12, 24, 36))
        kept = 0 if is_dilated else inputs
        self.joined = conv(kept + width * (len(pooled) + len(self.dilated)), width)
        self.classes = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        maps = [resized(branch(x), x) for branch in self.pooled]
        maps = [*maps, *(branch(x) for branch in self.dilated)] if self.dilated else [x, *maps]
        return self.classes(self.joined(torch.cat(maps, dim=1)))  # type: ignore[no-any-return]


class Segmenter(nn.Module):
    """A backbone with two heads; returns the loss."""

    def __init__(self, backbone: nn.Module, head: nn.Module, auxiliary: nn.Module):
        super().__init__()
        self.backbone, self.head, self.auxiliary = backbone, head, auxiliary

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of both heads' losses."""
        before, last = self.backbone(images)
        loss = self._loss(self.head(last), images, labels)
        return loss + self._loss(self.auxiliary(before), images, labels) * 0.4

    def _loss(self, scores: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        scores = resized(scores, images)
        each = F.nll_loss(LogSoftmax.apply(scores), labels, reduction="none", ignore_index=IGNORED)
        scores.topk(1, dim=1)  # for the accuracy
        return each.mean()


class LogSoftmax(torch.autograd.Function):
    """As before PyTorch 1.11, when it kept its input for the backward pass, beside its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the logarithms."""
        result = torch.log_softmax(x, 1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the input."""
        x, result = ctx.saved_tensors
        return torch.ops.aten._log_softmax_backward_data(gradients[0], result, 1, x.dtype)


def resized(x: Tensor, like: Tensor) -> Tensor:
    """Return the map, in the size of another."""
    return F.interpolate(x, like.shape[2:], mode="bilinear")


def build(name: str) -> Segmenter:
    """Return the network of a row of the table, such as ``"fcn R-50-D8, Cityscapes"``."""
    if name.startswith("UNet"):
        is_dilated = "DeepLabV3" in name
        head = (
            PyramidHead(64, 16, VESSEL_CLASSES, is_dilated=True)
            if is_dilated
            else FcnHead(64, 64, 1, VESSEL_CLASSES)
        )
        return Segmenter(UNet(), head, FcnHead(128, 64, 1, VESSEL_CLASSES))
    kind, _, described = name.partition(",")[0].rpartition(" ")
    _, number, reach = described.split("-")
    depth = int(number.rstrip("b"))
    strides, dilations = ((1, 2, 2, 1), (1, 1, 1, 2)) if reach == "D16" else (
        (1, 2, 1, 1), (1, 1, 2, 4))  # fmt: skip
    backbone = ResNet(depth, not number.endswith("b"), strides, dilations)
    inputs = backbone.channels
    width = inputs // 4
    head = (
        FcnHead(inputs, width, 2, CLASSES, 6 if "(D6)" in kind else 1)
        if kind.startswith("fcn")
        else PyramidHead(inputs, width, CLASSES, is_dilated=False)
    )
    return Segmenter(backbone, head, FcnHead(inputs // 2, width // 2, 1, CLASSES))
