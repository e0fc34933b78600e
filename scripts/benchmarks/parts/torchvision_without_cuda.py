"""Declares the operators of torchvision, for PyTorch builds that its wheel does not load with.

timm and transformers import torchvision for its transforms. Its wheel for CUDA cannot load its
operators into a PyTorch build for the CPU, and then fails on import, as it describes fake versions
of operators that are not there. No model here runs one: that they have a name and a signature is
enough.

Import it before them. Where the operators are there, it does nothing.
"""

from __future__ import annotations

import torch

_SIZES = "int batch_size, int channels, int height, int width"
_POOL = "float spatial_scale, int pooled_height, int pooled_width"
_DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, "
    "int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, "
    "int offset_groups, bool use_mask"
)
# https://github.com/pytorch/vision/tree/main/torchvision/csrc/ops
_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOL}, {_SIZES}, int sampling_ratio, "
    "bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOL}, {_SIZES}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, "
    f"int sampling_ratio, {_SIZES}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, {_SIZES}) "
    "-> Tensor",
    f"deform_conv2d({_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def declare_operators() -> None:
    """Declare them, unless torchvision can be imported as it is."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        _LIBRARY.extend(_declared())


def _declared() -> list[torch.library.Library]:
    library = torch.library.Library("torchvision", "DEF")
    for signature in _SIGNATURES:
        library.define(signature)
    return [library]


# What is declared is forgotten with the library object.
_LIBRARY: list[torch.library.Library] = []
declare_operators()
