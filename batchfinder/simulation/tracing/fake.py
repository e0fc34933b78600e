"""Fake tensors: training steps run on them at any size, on any machine, without data."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchfinder.errors import StepError
from batchfinder.probing.devices.collector import collector_off
from batchfinder.simulation.kernels.attention import ComputeCapability, attention_kernel
from batchfinder.simulation.kernels.packing import PACKING
from batchfinder.simulation.kernels.recurrent import RECURRENT
from batchfinder.simulation.kernels.rms_norm import FUSED_SINCE, rms_norm
from batchfinder.simulation.kernels.torch_version import TORCH_VERSION
from batchfinder.simulation.tracing.autocast import autocast_kernels, cuda_autocast_simulated
from batchfinder.simulation.tracing.copies import copied
from batchfinder.simulation.tracing.cuda_dispatch import (
    SOFTMAX,
    dropout,
    foreach_as_cuda,
    group_norm,
    kernels_replaced,
    linear,
)
from batchfinder.simulation.tracing.libraries import libraries_simulated
from batchfinder.simulation.tracing.refusal import USE_FIND
from batchfinder.simulation.tracing.wrappers import without_compile
from batchfinder.simulation.values.known import know, numbers_of
from batchfinder.simulation.values.shapes import new_literal, new_strided_like
from batchfinder.simulation.values.unknown import unknown_numbers
from batchfinder.training.placement import homes_of
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.anatomy import holds_tensors, tensors_of
from batchfinder.training.state.patching import replaced
from batchfinder.training.state.reach import reachable, tensor_hooks
from batchfinder.training.state.snapshot import refuse_lazy
from batchfinder.training.tree import named_tensors

T = TypeVar("T")

_LITERAL = torch.ops.aten.lift_fresh.default


class SimulatedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode of its own, to distinguish its tensors from those of ``torch.compile``."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; literals have a shorter way."""
        if func is _LITERAL and type(args[0]) is Tensor and self.may_turn_const(args[0]):
            return new_literal(args[0], self)
        return super().dispatch(func, types, args, kwargs)


@contextmanager
def fake_cuda(
    capability: ComputeCapability,
    *,
    torch_version: tuple[int, int] = TORCH_VERSION,
    alike: set[ComputeCapability] | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[FakeTensorMode]:
    """Run the block on fake CPU tensors whose operators choose kernels as on CUDA.

    Fake tensors "on cuda" are impossible: they abort the process in a PyTorch without CUDA.

    Example:
        >>> with fake_cuda((8, 0)):
        ...     torch.ones(10**6, 10**6).sum().shape
        torch.Size([])
    """
    autograd: dict[str, Callable[..., Any]] = {
        "dropout": dropout,
        "group_norm": group_norm,
        "linear": linear,
        "scaled_dot_product_attention": attention_kernel(capability, alike or set()),
        **SOFTMAX,
        **PACKING,
        **RECURRENT,
    }
    if torch_version >= FUSED_SINCE:
        autograd["rms_norm"] = rms_norm
    with ExitStack() as stack:
        stack.enter_context(kernels_replaced("AutocastCPU", autocast_kernels(torch_version)))
        stack.enter_context(kernels_replaced("AutogradCPU", autograd))
        stack.enter_context(cuda_autocast_simulated(warn))
        stack.enter_context(libraries_simulated())
        stack.enter_context(_numbers_printed())
        stack.enter_context(replaced(FakeTensor, __deepcopy__=_deep_copied))
        stack.enter_context(unknown_numbers())
        stack.enter_context(_scalars_listed())
        stack.callback(register_optimizer_step_pre_hook(foreach_as_cuda).remove)
        # A fallback would run the real kernel on tensors of the full size.
        mode = SimulatedMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        stack.enter_context(mode)
        stack.enter_context(collector_off())
        # PyTorch logs a traceback for each error that it also raises.
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(replaced(logger, disabled=True))
        yield mode


def _deep_copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Let a step copy caches and models; PyTorch would copy the mode with each fake tensor."""
    if not tensor.is_leaf:
        return Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call, no-any-return]
    memo[id(tensor)] = made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        memo[id(tensor)] = made = nn.Parameter(made, tensor.requires_grad)
    made.grad = copy.deepcopy(tensor.grad, memo)
    return made


def _numbers_printed() -> AbstractContextManager[Any]:
    """Let a step log its loss, as ``f"{loss:.3f}"``, and list values; unknown ones print as 0."""

    def formatted(self: Tensor, form: str) -> str:
        if self.dim():
            return object.__format__(self, form)
        number: Any = numbers_of(self)
        if number is None:
            number = 0.0 if self.is_floating_point() else 0
        return format(number, form)

    def listed(self: Tensor) -> Any:  # PyTorch 2.4 lists symbols instead
        return [part.tolist() for part in self] if self.dim() else self.item()

    return replaced(FakeTensor, __format__=formatted, tolist=listed)


def _scalars_listed() -> AbstractContextManager[Any]:
    """Let ``torch.tensor([...])`` and ``as_tensor`` collect scalars of fake tensors."""
    make = torch.tensor

    def stacked(data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        scalars = data if isinstance(data, (list, tuple)) else ()
        if not any(isinstance(each, FakeTensor) and not each.dim() for each in scalars):
            return None
        if not all(isinstance(each, (Tensor, int, float)) for each in scalars):
            return None  # a list of lists, whose refusal names the line
        parts = [each if isinstance(each, Tensor) else make(each) for each in scalars]
        listed = torch.cat([part.detach().reshape(1) for part in parts]).to(device, dtype)
        return listed.requires_grad_(bool(options.get("requires_grad")))

    def listing(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(data: Any, *args: Any, **options: Any) -> Any:
            listed = stacked(data, *args, **options)
            return original(data, *args, **options) if listed is None else listed

        return function

    return replaced(torch, tensor=listing(make), as_tensor=listing(torch.as_tensor))


def fake_copy(
    thing: T,
    mode: FakeTensorMode,
    *owners: nn.Module | Tensor,
    optimizers: Sequence[Optimizer] = (),
) -> T:
    """Copy models, optimizers and functions, with fake CPU tensors in place of their tensors.

    Args:
        thing: what to copy, as for :func:`~batchfinder.simulation.tracing.copies.copied`.
        mode: the active mode.
        owners: modules and tensors in it that may be on any device, such as a GPU or "meta".
        optimizers: optimizers in it; their copies start without state.
    """
    # Custom operators, which modules may hold, cannot be copied.
    memo: dict[int, Any] = {id(operator): operator for operator in OPDEFS.values()}
    memo.update({id(optimizer.state): defaultdict(dict) for optimizer in optimizers})
    tensors = {id(tensor): tensor for owner in owners for tensor in tensors_of(owner)}
    memo.update({key: _fake_like(tensor, mode) for key, tensor in tensors.items()})
    with FakeCopyMode(mode):
        copies = copied(thing, memo)
        for key, tensor in tensors.items():
            _hook(memo[key], tensor, memo)
            _attributes(memo[key], tensor, memo)
    values: dict[int, torch.UntypedStorage] = {}
    for tensor in (*tensors.values(), *_deepcopied(memo)):
        # Floating-point buffers are statistics, which kernels write to without declaring it. Other
        # buffers, such as positions and masks, stay as they are.
        is_statistic = id(tensor) in tensors and tensor.is_floating_point()
        if not (tensor.requires_grad or is_statistic):
            know(memo[id(tensor)], tensor, values)
    for owner in (*owners, *optimizers):
        if id(owner) not in memo:
            raise StepError(
                f"the step uses a {type(owner).__name__} that cannot be copied because a class or "
                f"a cache holds it: {USE_FIND}"
            )
    return copies


def _hook(fake: Tensor, tensor: Tensor, memo: dict[int, Any]) -> None:
    """Give a fake tensor copies of the user's hooks."""
    registers = (fake.register_hook, fake.register_post_accumulate_grad_hook)
    for register, hooks in zip(registers, tensor_hooks(tensor), strict=True):
        for hook in hooks.values():
            own = copied(hook, memo)
            if own != hook and fake.requires_grad:
                register(own)  # type: ignore[no-untyped-call]


def _attributes(fake: Tensor, tensor: Tensor, memo: dict[int, Any]) -> None:
    """Give a fake tensor copies of the attributes that its library's class adds, as its scales."""
    if type(tensor) in (Tensor, nn.Parameter) or hasattr(tensor, "__tensor_flatten__"):
        return
    own = {name: value for name, value in vars(tensor).items() if not hasattr(Tensor, name)}
    copies = {name: copy.deepcopy(value, memo) for name, value in own.items()}
    vars(fake).update(copies, _carried=[*copies.values()])


def with_carried(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return fake tensors, and those among their attributes, such as the scales of weights."""
    found: list[Tensor] = []
    pending: list[Any] = [*reversed(tensors)]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            found.append(value)
            pending += getattr(value, "_carried", ())
        elif hasattr(value, "__dict__") and not callable(value) and holds_tensors(value):
            pending += vars(value).values()
    return found


def fake_batch(batch: T, mode: FakeTensorMode) -> T:
    """Copy a batch of any type, with fake CPU tensors that know the values of its tensors."""
    # Meta tensors need replacements here: FakeCopyMode would leave them on "meta".
    on_meta = [tensor for _, tensor in named_tensors(batch) if tensor.is_meta]
    memo: dict[int, Any] = {id(tensor): new_strided_like(tensor, mode) for tensor in on_meta}
    with FakeCopyMode(mode):
        twin = copy.deepcopy(batch, memo)
    for tensor in _deepcopied(memo):
        know(memo[id(tensor)], tensor)
    return twin


def _deepcopied(memo: dict[int, Any]) -> list[Tensor]:
    """Return the tensors that ``copy.deepcopy`` copied; it lists them in the memo."""
    kept = memo.get(id(memo), ())
    return [thing for thing in kept if isinstance(thing, Tensor) and id(thing) in memo]


def _fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    fake = new_strided_like(tensor, mode)
    if isinstance(tensor, nn.Parameter):
        vars(fake)["_is_param"] = True  # nn.Parameter(fake) would make another fake tensor
        return fake.requires_grad_(tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def fake_setup(
    setup: TrainingSetup, mode: FakeTensorMode
) -> tuple[TrainingSetup, Sequence[Tensor]]:
    """Copy model, optimizer and functions without data, and everything that they reach.

    Returns:
        The copy, and the tensors that its functions reach on the model's devices.
    """
    for name, module in setup.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise StepError(f"{name or 'the model'} is compiled by TorchScript: {USE_FIND}")
    refuse_lazy(setup.model.parameters())
    own = setup.optimizer if isinstance(setup.optimizer, Optimizer) else None
    homes = homes_of(setup.model)
    reached = [*reachable(setup.functions)]
    owners = [thing for thing in reached if isinstance(thing, Tensor | nn.Module)]
    held = tuple(o for o in owners if isinstance(o, Tensor) and o.device in homes)
    optimizers = [thing for thing in (own, *reached) if isinstance(thing, Optimizer)]
    things = (setup.model, own, setup.step, setup.loss_fn, held)
    try:
        model, optimizer, step, loss_fn, held = fake_copy(
            things, mode, setup.model, *owners, optimizers=optimizers
        )
    except (TypeError, RuntimeError, SystemError) as error:
        reason = str(error).partition("\n")[0]
        why = "holds quantized tensors" if "uantized" in reason else f"cannot be copied ({reason})"
        raise StepError(f"the model {why}: {USE_FIND}") from error
    copied = dataclasses.replace(
        setup,
        model=without_compile(model),
        optimizer=optimizer or setup.optimizer,
        step=step,
        loss_fn=loss_fn,
    )
    return copied, held
