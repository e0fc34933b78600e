from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor, nn

from batchfinder.training.loss import MEAN_LOSS_WARNING, caller_of, default_loss

CLASSES = torch.tensor([2, 0, 1, 1])
X = torch.randn(4, 3, requires_grad=True)


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"loss_box": X.sum(), "loss_class": X.mean()}, X.sum() + X.mean()),
        ((X, X.mean()), X.mean()),
        ([X.mean(), X], X.mean()),
    ],
    ids=["losses of a detector", "logits first", "loss first"],
)
def test_the_scalars_of_such_a_model_are_the_loss(output: Any, expected: Tensor) -> None:
    loss, warning = default_loss(output, (X, CLASSES), model_got_all=True)
    assert (loss.item(), warning) == (expected.item(), None)


def test_a_scalar_beside_the_output_is_no_loss_if_the_model_did_not_get_the_targets() -> None:
    loss, _ = default_loss((X, X.mean()), (X, CLASSES))  # such as a mixture of experts
    assert loss.item() == F.cross_entropy(X, CLASSES).item()


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy, lambda logits, y: F.cross_entropy(logits, y)]
)
def test_a_loss_whose_second_parameter_is_named_for_targets_gets_them(loss: Any) -> None:
    expected = F.cross_entropy(X, CLASSES).item()
    assert caller_of(loss)(X, (X, CLASSES)).item() == expected
    assert caller_of(loss)(X, [X, CLASSES]).item() == expected
    assert caller_of(loss)(X, CLASSES).item() == expected  # the batch itself


def test_a_loss_that_wants_the_targets_alone_is_told_what_it_got() -> None:
    def loss(output: Tensor, classes: Any) -> Tensor:
        return F.cross_entropy(output, classes)

    with pytest.raises((TypeError, AttributeError)) as told:
        caller_of(loss)(X, (X, CLASSES))
    assert str(told.value).endswith(
        "(loss_fn got the output and all of the batch, a tuple of 2; if it takes the targets "
        "alone, give loss_fn=lambda output, batch: loss(output, batch[1]))"
    )


def test_a_loss_that_finds_no_targets_in_the_batch_is_told_so() -> None:
    with pytest.raises(IndexError, match=r"one tensor without targets. Try to return model, \(inp"):
        caller_of(lambda output, batch: F.cross_entropy(output, batch[7]))(X, X)
    with pytest.raises(KeyError, match="has the keys images"):
        caller_of(lambda output, batch: F.cross_entropy(output, batch["labels"]))(X, {"images": X})


@pytest.mark.parametrize(
    "output",
    [
        {"loss": X.sum(), "logits": X},
        SimpleNamespace(loss=X.sum(), logits=X),
        Output(X.sum(), X),
        X.sum(),
    ],
    ids=["mapping", "attribute", "namedtuple", "scalar"],
)
def test_the_outputs_own_loss_comes_before_the_targets(output: Any) -> None:
    loss, warning = default_loss(output, (X, CLASSES))
    assert loss.item() == X.sum().item()
    assert warning is None


def test_a_loss_per_device_is_averaged() -> None:
    loss, warning = default_loss({"loss": torch.tensor([1.0, 3.0])}, X)
    assert (loss.item(), warning) == (2.0, None)


def test_an_output_of_one_number_in_a_batch_of_one_is_no_loss() -> None:
    prediction, target = torch.ones(1, 1, requires_grad=True), torch.full((1, 1), 3.0)
    loss, warning = default_loss(prediction, (X, target))
    assert (loss.item(), warning) == (4.0, None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_are_classes(dtype: torch.dtype) -> None:
    loss, warning = default_loss(X, (X, CLASSES.to(dtype)))
    assert loss.item() == F.cross_entropy(X, CLASSES).item()
    assert warning is None


def test_a_class_for_each_pixel() -> None:
    logits, labels = torch.randn(2, 3, 5, 5), torch.randint(3, (2, 5, 5))
    loss, _ = default_loss(logits, (X, labels))
    assert loss.item() == F.cross_entropy(logits, labels).item()


def test_a_class_for_each_token_with_the_classes_last() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    loss, warning = default_loss(logits, (X, labels))
    expected = F.cross_entropy(logits.transpose(1, 2), labels)
    torch.testing.assert_close(loss, expected)
    assert warning is None


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_one_logit_for_each_label_of_zero_or_one(shape: tuple[int, ...]) -> None:
    logits, labels = torch.randn(4, 1), torch.tensor([0, 1, 1, 0])
    loss, warning = default_loss(logits, (X, labels.reshape(shape)))
    expected = F.binary_cross_entropy_with_logits(logits.flatten(), labels.float())
    assert loss.item() == expected.item()
    assert warning is None


def test_many_labels_of_zero_or_one_for_each_example() -> None:
    labels = torch.randint(2, (4, 3)).bool()
    loss, _ = default_loss(X, (X, labels))
    assert loss.item() == F.binary_cross_entropy_with_logits(X, labels.float()).item()


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_real_targets_are_values(shape: tuple[int, ...]) -> None:
    prediction, target = torch.randn(4, 1), torch.randn(4)
    loss, warning = default_loss(prediction.reshape(shape), (X, target))
    assert loss.item() == F.mse_loss(prediction.flatten(), target).item()
    assert warning is None


@pytest.mark.parametrize(
    "output", [{"logits": X}, SimpleNamespace(logits=X), (X, torch.ones(7))], ids=type
)
def test_the_logits_among_the_outputs_are_compared_with_the_targets(output: Any) -> None:
    loss, warning = default_loss(output, (X, CLASSES))
    assert loss.item() == F.cross_entropy(X, CLASSES).item()
    assert warning is None


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        ([torch.full((2, 2), 3.0, requires_grad=True), torch.ones(1, requires_grad=True)], X),
        (torch.full((4, 3), 2.0, requires_grad=True), (X, torch.ones(4, 5))),
        ({"a": torch.full((4, 3), 2.0, requires_grad=True), "b": CLASSES}, {"x": X}),
        (torch.full((4, 3), 2 + 2j, requires_grad=True), X),
    ],
    ids=["several outputs", "targets of another shape", "no targets", "complex"],
)
def test_else_it_is_the_mean_of_the_floating_outputs_and_that_is_said(
    output: Any, batch: Any
) -> None:
    loss, warning = default_loss(output, batch)
    assert (loss.item(), warning) == (2.0, MEAN_LOSS_WARNING)
    assert loss.requires_grad


def test_without_any_floating_output_there_is_nothing_to_train() -> None:
    loss, _ = default_loss(CLASSES, X)
    assert not loss.requires_grad
