"""Fake tensors made without PyTorch's own constructor."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from batchfinder.simulation.values.shapes import new_like, new_strided_like, new_tensor


def test_quick_fake_tensors_equal_those_of_pytorch() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        original = torch.empty(3, 4, dtype=torch.float16)
        new_like(original)  # the first of a mode is the pattern of the others
        made = [
            new_like(original),
            new_tensor(original, (3, 4)),
            new_strided_like(torch.empty(3, 4, dtype=torch.float16), mode),
        ]
        for fake in made:
            assert isinstance(fake, FakeTensor)
            assert vars(fake) == vars(original)
            assert vars(fake) is not vars(original)
            assert (fake.shape, fake.stride()) == (original.shape, original.stride())
            assert (fake.dtype, fake.device) == (original.dtype, torch.device("cpu"))
            assert str(torch._C._dispatch_keys(fake)) == str(torch._C._dispatch_keys(original))
            assert fake.untyped_storage().device.type == "meta"
            assert (fake @ torch.empty(4, 2, dtype=torch.float16)).shape == (3, 2)
