"""What losses and selections take beside what they return, as PyTorch's CUDA kernels do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from batchfinder import TrainingSetup, estimate_peak_memory
from batchfinder.simulation.kernels.rms_norm import FUSED_SINCE
from batchfinder.simulation.kernels.torch_version import TORCH_VERSION

# As large as the parameter, so that all that counts is a multiple of it.
SIDE, BYTES = 2048, 2048 * 2048 * 4


class Table(nn.Module):
    """A parameter of 16 MiB, doubled, with targets and places of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.register_buffer("targets", torch.zeros(SIDE, SIDE))
        self.register_buffer("places", torch.zeros(SIDE, SIDE, dtype=torch.long))

    def forward(self, _: Tensor) -> Tensor:
        return self.table * 2


def peak_bytes(loss: Callable[[Tensor, Any], Tensor]) -> int:
    setup = TrainingSetup(
        Table(), torch.zeros(1, 1), step=lambda model, x: loss(model(x), model), optimizer="sgd"
    )
    return estimate_peak_memory(setup, batch_size=1, gpu="h100").peak_allocated_bytes


@functools.cache
def peak_of_mean() -> int:
    return peak_bytes(lambda output, _: output.mean())


def tables_more(loss: Callable[[Tensor, Any], Tensor]) -> float:
    """What a step peaks at, beyond one whose loss is the mean, in multiples of the parameter."""
    return (peak_bytes(loss) - peak_of_mean()) / BYTES


# Read off PyTorch 2.11 on the counting runtime of scripts/counting_cuda.
@pytest.mark.parametrize(
    ("name", "tables"),
    [("mse_loss", 2), ("smooth_l1_loss", 2), ("huber_loss", 0), ("l1_loss", 2)],
)
def test_some_losses_keep_the_storage_of_their_values(name: str, tables: int) -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        value: Tensor = getattr(F, name)(output, model.targets)
        return value

    assert tables_more(loss) == pytest.approx(tables, abs=0.01)


def test_without_reduction_there_is_nothing_to_keep() -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        return F.mse_loss(output, model.targets, reduction="none").mean()

    assert tables_more(loss) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("select", "tables"),
    [
        (lambda output, model: output.gather(1, model.places[:, :1]), 0),
        (lambda output, model: output.gather(1, model.places), 1),
        (lambda output, model: output.index_select(1, model.places[0, ::2]), 0),
        (lambda output, model: output[:, model.places[0, ::2]], 0),
        (lambda output, model: output.max(1).values, 0),
        (lambda output, model: output.sort(1).values, 2),
        (lambda output, model: output.cummax(1).values, 3),
        (lambda output, model: output.max(), 1.5),  # with two masks of a byte each
    ],
    ids=["gather", "gather all", "index_select", "index", "max", "sort", "cummax", "max of all"],
)
def test_gradients_of_a_selection_are_written_into_zeros(
    select: Callable[[Tensor, Any], Tensor], tables: float
) -> None:
    more = tables_more(lambda output, model: select(output, model).mean())
    assert more == pytest.approx(tables, abs=0.01)


@pytest.mark.parametrize(
    ("loss", "tables"),
    [
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y), 1),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none").mean(), 1),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0]), 2),
        (lambda x, y: F.multilabel_soft_margin_loss(x, y), 4),
        (lambda x, y: F.logsigmoid(x).mean(), 1),
    ],
    ids=["reduced", "unreduced", "weighed", "multilabel", "logsigmoid"],
)
def test_losses_of_logits_work_in_place_and_keep_no_buffer(
    loss: Callable[[Tensor, Tensor], Tensor], tables: int
) -> None:
    more = tables_more(lambda output, model: loss(output, model.targets))
    assert more == pytest.approx(tables, abs=0.01)


@pytest.mark.parametrize("weights", [(1,), (1, SIDE), (SIDE, 1), ()])
def test_a_weight_of_any_shape_stays_as_it_is(weights: tuple[int, ...]) -> None:
    """Also where the loss is of one column, or a hook scales its gradient."""

    def loss(output: Tensor, model: Any) -> Tensor:
        weight = torch.ones(weights, device=output.device)
        one = weights == (1,)
        value = F.binary_cross_entropy_with_logits(
            output[:, 0] if one else output,
            model.targets[:, 0] if one else model.targets,
            pos_weight=weight,
        )
        value.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return value

    assert tables_more(loss) >= 0


def test_a_number_is_summed_up_too() -> None:
    assert tables_more(lambda output, _: output.mean().sum(0)) == pytest.approx(0, abs=0.01)


def test_the_gradients_of_variance_and_mean_are_added_out_of_place() -> None:
    def loss(output: Tensor, _: Any) -> Tensor:
        return torch.stack(torch.var_mean(output, 1)).mean()

    assert tables_more(loss) == pytest.approx(2, abs=0.01)


def test_variances_pass_for_positive() -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        return F.gaussian_nll_loss(output, model.targets, output.exp())

    assert tables_more(loss) == pytest.approx(7, abs=0.01)


# The counting runtime has no values; there, too, the arguments were let pass for valid.
@pytest.mark.parametrize(
    ("distribution", "tables"),
    [("Normal", 10), ("Categorical", 4), ("Gamma", 8.75), ("Dirichlet", 6.75)],
)
def test_the_arguments_of_distributions_pass_for_valid(distribution: str, tables: float) -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        kind = getattr(torch.distributions, distribution)
        arguments = [output.exp()] * (1 if distribution in ("Categorical", "Dirichlet") else 2)
        over = kind(*arguments)
        drawn = over.rsample() if over.has_rsample else over.sample()
        value: Tensor = over.log_prob(drawn).mean() + drawn.float().mean()
        return value

    assert tables_more(loss) == pytest.approx(tables, abs=0.01)


@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss"])
def test_gradients_are_known_where_pytorch_says_nothing_of_their_shape(name: str) -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        places = model.places if name.startswith("multilabel") else model.places[0]
        value: Tensor = getattr(F, name)(output, places)
        return value

    assert tables_more(loss) == pytest.approx(1 if name.startswith("multilabel") else 0, abs=0.02)


def test_columns_of_images_are_folded_into_a_storage_of_their_own_size() -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        return F.unfold(output.view(1, 1, SIDE, SIDE), 3, padding=1).mean()

    # The gradients of the columns, 9 times the image, and what they are folded into, for two.
    assert tables_more(loss) == pytest.approx(2 * 9 - 2, abs=0.01)


def test_the_gradient_of_a_softmax_takes_a_product_beside_it() -> None:
    """It needs the weights and their gradient anyway: two tables, and the product is the third."""
    assert tables_more(lambda output, _: output.softmax(-1).mean()) == pytest.approx(2, abs=0.01)


def test_the_gradient_of_a_soft_margin_takes_two_tables_beside_it() -> None:
    def loss(output: Tensor, model: Any) -> Tensor:
        return F.soft_margin_loss(output, model.targets)

    assert tables_more(loss) == pytest.approx(3, abs=0.01)


@pytest.mark.skipif(TORCH_VERSION < FUSED_SINCE, reason="made of other operators there")
def test_rms_norm_keeps_a_number_for_each_row() -> None:
    def loss(output: Tensor, _: Any) -> Tensor:
        return F.rms_norm(output, [SIDE]).mean()

    # Its input, which a mean does not keep.
    assert tables_more(loss) == pytest.approx(1, abs=0.01)
