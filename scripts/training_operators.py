"""Operators with a gradient, each on values of 64 MiB: what ``bench_operators.py`` compares."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor

BATCH, ROWS, COLUMNS = 8, 512, 4096
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]  # of values, indices and targets


def images(values: Tensor) -> Tensor:
    """Each row as a picture."""
    return values.view(-1, ROWS, 64, 64)


def heads(values: Tensor) -> Tensor:
    """Each row as the eight heads of attention."""
    return values.view(-1, ROWS, 8, COLUMNS // 8).transpose(1, 2)


def every_other(values: Tensor) -> Tensor:
    """The numbers of half of the columns."""
    return torch.arange(0, COLUMNS, 2, device=values.device)


def grid(values: Tensor) -> Tensor:
    """Where in a picture to look, for each of its points."""
    return images(values)[:, :2].permute(0, 2, 3, 1).detach() * 2 - 1


def assigned(values: Tensor, target: Tensor) -> Tensor:
    """Values written over a part of others."""
    target = target.clone()
    target[..., : COLUMNS // 2] = values[..., : COLUMNS // 2]
    return target


OPERATORS: dict[str, Operator] = {
    "abs": lambda y, i, t: y.abs(),
    "adaptive_avg_pool2d": lambda y, i, t: F.adaptive_avg_pool2d(images(y), 7),
    "adaptive_max_pool2d": lambda y, i, t: F.adaptive_max_pool2d(images(y), 7),
    "add": lambda y, i, t: y + t,
    "addcdiv": lambda y, i, t: torch.addcdiv(y, t, t + 1),
    "addcmul": lambda y, i, t: torch.addcmul(y, y, t),
    "alpha_dropout": lambda y, i, t: F.alpha_dropout(y, 0.1),
    "amax": lambda y, i, t: y.amax(-1),
    "atan2": lambda y, i, t: torch.atan2(y, t),
    "avg_pool2d": lambda y, i, t: F.avg_pool2d(images(y), 2),
    "batch_norm": lambda y, i, t: F.batch_norm(images(y), None, None, training=True),
    "binary_cross_entropy": lambda y, i, t: F.binary_cross_entropy(y.sigmoid(), t),
    "binary_cross_entropy_with_logits": lambda y, i, t: F.binary_cross_entropy_with_logits(y, t),
    "binary_cross_entropy_with_logits, unreduced": lambda y, i, t: (
        F.binary_cross_entropy_with_logits(y, t, reduction="none")
    ),
    "binary_cross_entropy_with_logits, weighed": lambda y, i, t: F.binary_cross_entropy_with_logits(
        y, t, pos_weight=t[0, 0]
    ),
    "bmm": lambda y, i, t: y @ t.transpose(1, 2),
    "cat": lambda y, i, t: torch.cat([y, t], 1),
    "cdist": lambda y, i, t: torch.cdist(y, t),
    "celu": lambda y, i, t: F.celu(y),
    "channel_shuffle": lambda y, i, t: F.channel_shuffle(images(y), 4),
    "clamp": lambda y, i, t: y.clamp(0, 1),
    "cosine_embedding_loss": lambda y, i, t: F.cosine_embedding_loss(
        y.flatten(0, 1), t.flatten(0, 1), i[..., 0].flatten().sign()
    ),
    "cosine_similarity": lambda y, i, t: F.cosine_similarity(y, t, dim=-1),
    "cross_entropy": lambda y, i, t: F.cross_entropy(y.flatten(0, 1), i[..., 0].flatten()),
    "cross_entropy, label smoothing": lambda y, i, t: F.cross_entropy(
        y.flatten(0, 1), i[..., 0].flatten(), label_smoothing=0.1
    ),
    "cross_entropy, of pictures": lambda y, i, t: F.cross_entropy(
        images(y), images(i)[:, 0] % ROWS
    ),
    "cross_entropy, probabilities": lambda y, i, t: F.cross_entropy(
        y.flatten(0, 1), t.flatten(0, 1)
    ),
    "cross_entropy, weighed": lambda y, i, t: F.cross_entropy(
        y.flatten(0, 1), i[..., 0].flatten(), t[0, 0]
    ),
    "cummax": lambda y, i, t: y.cummax(-1)[0],
    "cumprod": lambda y, i, t: (y + 1).cumprod(-1),
    "cumsum": lambda y, i, t: y.cumsum(-1),
    "diff": lambda y, i, t: y.diff(dim=-1),
    "div": lambda y, i, t: y / (t + 1),
    "dropout": lambda y, i, t: F.dropout(y, 0.1),
    "dropout2d": lambda y, i, t: F.dropout2d(images(y), 0.1),
    "einsum": lambda y, i, t: torch.einsum("bij,bkj->bik", y, t),
    "elu": lambda y, i, t: F.elu(y),
    "embedding": lambda y, i, t: F.embedding(i[..., :16], y.flatten(0, 1)),
    "embedding_bag": lambda y, i, t: F.embedding_bag(i[:, :, :16].flatten(0, 1), y.flatten(0, 1)),
    "erf": lambda y, i, t: y.erf(),
    "exp": lambda y, i, t: y.exp(),
    "expand": lambda y, i, t: y[..., None].expand(*y.shape, 2).contiguous(),
    "flip": lambda y, i, t: y.flip(-1),
    "fold": lambda y, i, t: F.fold(F.unfold(images(y), 2, stride=2), (64, 64), 2, stride=2),
    "gather": lambda y, i, t: y.gather(-1, i),
    "gather, one of each row": lambda y, i, t: y.gather(-1, i[..., :1]),
    "gaussian_nll_loss": lambda y, i, t: F.gaussian_nll_loss(y, t, y.exp()),
    "gelu": lambda y, i, t: F.gelu(y),
    "glu": lambda y, i, t: F.glu(y, -1),
    "grid_sample": lambda y, i, t: F.grid_sample(images(y), grid(y), align_corners=False),
    "group_norm": lambda y, i, t: F.group_norm(images(y), 8),
    "gumbel_softmax": lambda y, i, t: F.gumbel_softmax(y),
    "gumbel_softmax, hard": lambda y, i, t: F.gumbel_softmax(y, hard=True),
    "hardsigmoid": lambda y, i, t: F.hardsigmoid(y),
    "hardswish": lambda y, i, t: F.hardswish(y),
    "hardtanh": lambda y, i, t: F.hardtanh(y),
    "hinge_embedding_loss": lambda y, i, t: F.hinge_embedding_loss(y, t),
    "huber_loss": lambda y, i, t: F.huber_loss(y, t),
    "index": lambda y, i, t: y[:, :, every_other(y)],
    "index_add": lambda y, i, t: t.index_add(2, torch.arange(COLUMNS, device=y.device), y),
    "index_copy": lambda y, i, t: t.index_copy(1, torch.arange(ROWS, device=y.device), y),
    "index_fill": lambda y, i, t: y.index_fill(-1, every_other(y), 0.0),
    "index_put": lambda y, i, t: t.index_put((torch.arange(BATCH, device=y.device),), y),
    "index_select": lambda y, i, t: y.index_select(2, every_other(y)),
    "instance_norm": lambda y, i, t: F.instance_norm(images(y)),
    "interpolate": lambda y, i, t: F.interpolate(images(y), scale_factor=2, mode="bilinear"),
    "interpolate, bicubic": lambda y, i, t: F.interpolate(
        images(y), scale_factor=2, mode="bicubic"
    ),
    "interpolate, nearest": lambda y, i, t: F.interpolate(
        images(y), scale_factor=2, mode="nearest"
    ),
    "kl_div": lambda y, i, t: F.kl_div(F.log_softmax(y, -1), t),
    "kl_div, unreduced": lambda y, i, t: F.kl_div(F.log_softmax(y, -1), t, reduction="none"),
    "l1_loss": lambda y, i, t: F.l1_loss(y, t),
    "l1_loss, unreduced": lambda y, i, t: F.l1_loss(y, t, reduction="none"),
    "layer_norm": lambda y, i, t: F.layer_norm(y, (COLUMNS,)),
    "leaky_relu": lambda y, i, t: F.leaky_relu(y),
    "lerp": lambda y, i, t: torch.lerp(y, t, 0.5),
    "local_response_norm": lambda y, i, t: F.local_response_norm(images(y), 5),
    "log": lambda y, i, t: (y + 1).log(),
    "log_softmax": lambda y, i, t: F.log_softmax(y, -1),
    "logaddexp": lambda y, i, t: torch.logaddexp(y, t),
    "logcumsumexp": lambda y, i, t: y.logcumsumexp(-1),
    "logsigmoid": lambda y, i, t: F.logsigmoid(y),
    "logsumexp": lambda y, i, t: y.logsumexp(-1),
    "lp_pool2d": lambda y, i, t: F.lp_pool2d(images(y), 2, 2),
    "margin_ranking_loss": lambda y, i, t: F.margin_ranking_loss(y, t, t),
    "masked_fill": lambda y, i, t: y.masked_fill(t > 0.5, 0.0),
    "max": lambda y, i, t: y.max(),
    "max of each row": lambda y, i, t: y.max(-1)[0],
    "max_pool2d": lambda y, i, t: F.max_pool2d(images(y), 2),
    "maximum": lambda y, i, t: torch.maximum(y, t),
    "mean of each row": lambda y, i, t: y.mean(-1),
    "median of each row": lambda y, i, t: y.median(-1)[0],
    "mish": lambda y, i, t: F.mish(y),
    "mse_loss": lambda y, i, t: F.mse_loss(y, t),
    "mse_loss, unreduced": lambda y, i, t: F.mse_loss(y, t, reduction="none"),
    "mul": lambda y, i, t: y * t,
    "multi_margin_loss": lambda y, i, t: F.multi_margin_loss(y.flatten(0, 1), i[..., 0].flatten()),
    "multilabel_margin_loss": lambda y, i, t: F.multilabel_margin_loss(
        y.flatten(0, 1), i.flatten(0, 1)
    ),
    "multilabel_soft_margin_loss": lambda y, i, t: F.multilabel_soft_margin_loss(
        y.flatten(0, 1), t.flatten(0, 1)
    ),
    "nan_to_num": lambda y, i, t: y.nan_to_num(),
    "nll_loss": lambda y, i, t: F.nll_loss(y.flatten(0, 1), i[..., 0].flatten()),
    "norm": lambda y, i, t: y.norm(dim=-1),
    "norm of all": lambda y, i, t: y.norm(),
    "norm, infinite": lambda y, i, t: y.norm(p=float("inf"), dim=-1),
    "norm, p = 1": lambda y, i, t: y.norm(p=1, dim=-1),
    "norm, p = 3": lambda y, i, t: y.norm(p=3, dim=-1),
    "normalize": lambda y, i, t: F.normalize(y, dim=-1),
    "outer": lambda y, i, t: torch.outer(y[0, 0], y[0, 1]),
    "pad": lambda y, i, t: F.pad(y, (1, 1)),
    "pad, circular": lambda y, i, t: F.pad(y, (1, 1), mode="circular"),
    "pad, reflected": lambda y, i, t: F.pad(y, (1, 1), mode="reflect"),
    "pad, replicated": lambda y, i, t: F.pad(y, (1, 1), mode="replicate"),
    "pairwise_distance": lambda y, i, t: F.pairwise_distance(y, t),
    "permute": lambda y, i, t: y.transpose(1, 2).contiguous(),
    "pixel_shuffle": lambda y, i, t: F.pixel_shuffle(images(y), 2),
    "poisson_nll_loss": lambda y, i, t: F.poisson_nll_loss(y, t),
    "pow": lambda y, i, t: y.pow(3),
    "prelu": lambda y, i, t: F.prelu(y, torch.full((1,), 0.2, device=y.device)),
    "reciprocal": lambda y, i, t: (y + 1).reciprocal(),
    "relu": lambda y, i, t: F.relu(y),
    "relu6": lambda y, i, t: F.relu6(y),
    "renorm": lambda y, i, t: y.renorm(2, 0, 1.0),
    "repeat": lambda y, i, t: y.repeat(1, 1, 2),
    "repeat_interleave": lambda y, i, t: y.repeat_interleave(2, 1),
    "rms_norm": lambda y, i, t: F.rms_norm(y, (COLUMNS,)),
    "roll": lambda y, i, t: y.roll(1, -1),
    "rrelu": lambda y, i, t: F.rrelu(y, training=True),
    "rsqrt": lambda y, i, t: (y + 1).rsqrt(),
    "scaled_dot_product_attention": lambda y, i, t: F.scaled_dot_product_attention(
        heads(y), heads(t), heads(t)
    ),
    "scaled_dot_product_attention, causal": lambda y, i, t: F.scaled_dot_product_attention(
        heads(y), heads(y), heads(y), is_causal=True
    ),
    "scaled_dot_product_attention, masked": lambda y, i, t: F.scaled_dot_product_attention(
        heads(y), heads(y), heads(y), t[0, :, :ROWS]
    ),
    "scatter": lambda y, i, t: t.scatter(-1, i, y),
    "scatter_add": lambda y, i, t: t.scatter_add(-1, i, y),
    "scatter_reduce": lambda y, i, t: t.scatter_reduce(-1, i, y, "amax"),
    "selu": lambda y, i, t: F.selu(y),
    "sigmoid": lambda y, i, t: y.sigmoid(),
    "silu": lambda y, i, t: F.silu(y),
    "sin": lambda y, i, t: y.sin(),
    "slice": lambda y, i, t: y[..., 1:],
    "slice, assigned": lambda y, i, t: assigned(y, t),
    "smooth_l1_loss": lambda y, i, t: F.smooth_l1_loss(y, t),
    "soft_margin_loss": lambda y, i, t: F.soft_margin_loss(y, t),
    "softmax": lambda y, i, t: y.softmax(-1),
    "softmin": lambda y, i, t: F.softmin(y, -1),
    "softplus": lambda y, i, t: F.softplus(y),
    "softshrink": lambda y, i, t: F.softshrink(y),
    "softsign": lambda y, i, t: F.softsign(y),
    "sort": lambda y, i, t: y.sort(-1)[0],
    "split": lambda y, i, t: torch.cat(torch.split(y, 1024, -1)[::-1], -1),
    "sqrt": lambda y, i, t: (y + 1).sqrt(),
    "square": lambda y, i, t: y.square(),
    "stack": lambda y, i, t: torch.stack([y, t]),
    "std": lambda y, i, t: y.std(-1),
    "sub": lambda y, i, t: t - y,
    "sum": lambda y, i, t: y.sum(),
    "take_along_dim": lambda y, i, t: y.take_along_dim(i[..., :2], -1),
    "tanh": lambda y, i, t: y.tanh(),
    "tanhshrink": lambda y, i, t: F.tanhshrink(y),
    "threshold": lambda y, i, t: F.threshold(y, 0.5, 0.0),
    "topk": lambda y, i, t: y.topk(4, -1)[0],
    "tril": lambda y, i, t: y.tril(),
    "triplet_margin_loss": lambda y, i, t: F.triplet_margin_loss(y, t, y * 2),
    "unbind": lambda y, i, t: torch.stack(y.unbind(1)[::-1]),
    "unfold": lambda y, i, t: F.unfold(images(y), 3),
    "var": lambda y, i, t: y.var(-1),
    "var_mean": lambda y, i, t: torch.stack(torch.var_mean(y, -1)),
    "vector_norm": lambda y, i, t: torch.linalg.vector_norm(y, dim=-1),
    "weight_norm": lambda y, i, t: torch._weight_norm(
        y.flatten(0, 1), t[0, :1, :1].expand(BATCH * ROWS, 1)
    ),
    "where": lambda y, i, t: torch.where(t > 0.5, y, t),
    "xlogy": lambda y, i, t: torch.xlogy(t, y + 1),
}
ONLY_FP32 = ("binary_cross_entropy",)  # PyTorch refuses it under autocast
