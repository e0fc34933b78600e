from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor, nn

from batchfinder.errors import StepError
from batchfinder.training.calling import as_one, as_parts, call_model, way_of

CLASSES = torch.tensor([2, 0, 1, 1])
X = torch.randn(4, 3, requires_grad=True)


class Recorder(nn.Module):
    """Keeps what it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = args, kwargs
        return torch.zeros(())


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, CLASSES), (X,), {}),
        ([X, CLASSES], (X,), {}),
        ([X], (X,), {}),
        ({"x": X, "labels": CLASSES}, (), {"x": X, "labels": CLASSES}),
        (({"x": X}, CLASSES), (), {"x": X}),
    ],
)
def test_how_a_batch_is_passed(batch: Any, args: Any, kwargs: Any) -> None:
    model = Recorder()
    call_model(model, batch)
    assert model.seen == (args, kwargs)


def test_a_tuple_of_three_is_one_argument() -> None:
    model = Recorder()
    batch = (X, X, CLASSES)
    call_model(model, batch)
    assert model.seen == ((batch,), {})


@pytest.mark.parametrize("error", ["linear(): must be Tensor, not tuple", "len() of a tuple"])
def test_what_the_model_got_is_told_where_it_fails_on_it(error: str) -> None:
    kind = TypeError if "must be" in error else AttributeError

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise kind(error)

    with pytest.raises(kind) as told:
        call_model(Picky(), [X, X, CLASSES])
    assert str(told.value) == (
        f"{error} (the model got all of the batch, a list of 3; "
        "give step(model, batch) if it takes a part of it)"
    )
    with pytest.raises(kind) as told:
        call_model(Picky(), (X, CLASSES))
    assert str(told.value) == error


@pytest.mark.parametrize("kind", [TypeError, ValueError, AssertionError])
def test_a_model_that_misses_a_part_is_told_that_it_got_the_inputs(kind: type[Exception]) -> None:
    class Detector(nn.Module):
        def forward(self, images: Tensor, boxes: Tensor | None = None) -> dict[str, Tensor]:
            if boxes is None:
                raise kind("no boxes")
            return {"loss_box": images.mean(), "loss_class": images.mean()}

    with pytest.raises(kind, match=r"no boxes \(the model got the first part of the batch alone"):
        call_model(Detector(), (X, CLASSES))


class Gpt(nn.Module):
    """As nanoGPT's: without the targets, it makes no loss and only the last token's logits."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if targets is None:
            return idx[:, -1:], None
        return idx, F.cross_entropy(idx, targets)


def test_a_model_that_takes_the_targets_makes_the_loss() -> None:
    loss = call_model(Gpt(), (X, CLASSES))[1]
    assert loss.item() == F.cross_entropy(X, CLASSES).item()
    compiled = cast("nn.Module", torch.compile(Gpt(), backend="eager"))
    assert way_of(compiled, (X, CLASSES)) is as_parts
    for batch in (X, (X, X, CLASSES)):
        assert way_of(Gpt(), batch) is as_one


def test_inference_has_no_targets() -> None:
    assert way_of(Gpt(), (X, CLASSES), for_loss=False) is as_one


@pytest.mark.parametrize("second", ["attention_mask", "boxes"])
def test_other_optional_parts_are_no_targets(second: str) -> None:
    space: dict[str, Any] = {"nn": nn}
    exec(f"class Model(nn.Module):\n def forward(self, x, {second}=None): pass", space)
    assert way_of(space["Model"](), (X, CLASSES)) is as_one


def test_a_mapping_is_one_argument_if_forward_knows_none_of_its_keys() -> None:
    class Whole(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["image"].sum()

    batch = {"image": X, "label": CLASSES}
    assert call_model(Whole(), batch).item() == X.sum().item()

    class Named(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image.sum()

    with pytest.raises(StepError, match=r"model\(image=..., label=...\), .*unexpected .*'label'"):
        call_model(Named(), batch)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_model_that_needs_all_parts_gets_them(parts: int) -> None:
    class Pair(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a + b).sum()

    class Triple(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return (a + b + c).sum()

    model = Pair() if parts == 2 else Triple()
    for for_loss in (True, False):
        way = way_of(model, (X,) * parts, for_loss=for_loss)
        torch.testing.assert_close(call_model(model, (X,) * parts, way), parts * X.sum())


def test_a_model_that_reads_the_fields_of_a_namedtuple_is_told_what_it_got() -> None:
    class Batch(NamedTuple):
        images: Tensor
        labels: Tensor

    class Whole(nn.Module):
        def forward(self, batch: Batch) -> Tensor:
            return batch.images.mean()

    with pytest.raises(AttributeError, match=r"got batch.images alone.* model\(batch\)"):
        call_model(Whole(), Batch(X, CLASSES))


@pytest.mark.parametrize(
    ("batch", "call"),
    [
        ((X,), r"model\(inputs\), .*TwoInputs.forward .*missing .*'boxes'"),
        ((X, X, CLASSES), r"model\(batch\), "),
        ({"images": X, "labels": X}, r"model\(images=..., labels=...\), .*missing .*'boxes'"),
    ],
)
def test_a_model_that_is_called_otherwise_needs_a_step(batch: Any, call: str) -> None:
    class TwoInputs(nn.Module):
        def forward(self, images: Tensor, boxes: Tensor) -> Tensor:
            return images + boxes

    with pytest.raises(
        StepError, match=call + r".*give step\(model, batch\).*\(model, sample=..., step"
    ):
        call_model(TwoInputs(), batch)


def test_a_type_error_inside_the_model_is_the_models() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return len(3)  # type: ignore[arg-type,return-value]

    with pytest.raises(TypeError, match="has no len"):
        call_model(Broken(), X)
