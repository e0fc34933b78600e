from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.workers.pickled_setup import pickle_setup, unpickle_setup
from batchfinder.training.setup import TrainingSetup
from batchfinder.units import MIB


class Flat(nn.Module):
    """Its weights are parts of one storage, as those of an LSTM on a GPU are."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.flat = torch.randn(parts, MIB // 4)
        self.weights = nn.ParameterList([nn.Parameter(part) for part in self.flat])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sum() * self.flat.sum()


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_weights_that_share_a_storage_are_sent_once_and_share_it_again() -> None:
    model = Flat(parts=8)
    pickled = pickle_setup(TrainingSetup(model, torch.ones(2, 3)))
    assert 8 * MIB < len(pickled) < 9 * MIB
    sent = unpickle_setup(pickled).model
    assert len(storages(sent.parameters())) == 1
    torch.testing.assert_close(sent.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_of_a_data_set_only_the_sample_is_sent() -> None:
    inputs, labels = torch.randn(1000, MIB // 1000), torch.arange(1000.0, requires_grad=True)
    sample = {"inputs": inputs[2:4], "labels": (labels[2:4], "text")}
    pickled = pickle_setup(TrainingSetup(nn.Linear(1, 1), sample))
    assert len(pickled) < MIB / 10
    sent = unpickle_setup(pickled).sample
    torch.testing.assert_close(sent["inputs"], inputs[2:4], rtol=0, atol=0)
    assert sent["labels"][0].requires_grad
    assert sent["labels"][1] == "text"


def test_a_sample_that_is_expanded_stays_so() -> None:
    sample = torch.ones(1, 3).expand(1000, 3)
    sent = unpickle_setup(pickle_setup(TrainingSetup(nn.Linear(3, 1), sample))).sample
    assert sent.shape == (1000, 3)
    assert sent.untyped_storage().nbytes() == 12


class RaisesOnceThere:
    """Unpickles by raising."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raise_it, (self.error,)


def raise_it(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            RuntimeError("CUDA out of memory. Tried to allocate"),
            DeviceError,
            "second copy of model",
        ),
        (ValueError("not here"), UsageError, r"in another process \(ValueError: not here\)"),
    ],
)
def test_what_goes_wrong_in_the_other_process(
    error: Exception, expected: type[Exception], message: str
) -> None:
    pickled = pickle_setup(TrainingSetup(nn.Linear(1, 1), RaisesOnceThere(error)))
    with pytest.raises(expected, match=message):
        unpickle_setup(pickled)
