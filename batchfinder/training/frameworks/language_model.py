"""Make a language model to fine-tune from its configuration: ``hf:meta-llama/Llama-3.1-8B``.

Transformers, PEFT and bitsandbytes are imported when such a model is made. Its weights are random.
If ``torch.device("meta")`` is the default device, as for estimates, they have no data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder.errors import UsageError
from batchfinder.training.frameworks import ATTENTION, METHODS
from batchfinder.training.frameworks.architecture import TASKS, beyond_positions, built, example
from batchfinder.training.frameworks.quantization import (
    PREPARED,
    cast_adapters,
    imported,
    prepare_weights,
    quantize_weights,
)
from batchfinder.training.frameworks.transformers_trainer import in_precision
from batchfinder.training.optimizer import DEFAULT_OPTIMIZER, FUSED
from batchfinder.training.setup import DTYPES, TrainingSetup
from batchfinder.training.step_source import KeptUntil, StepSource

DEFAULT_RANK = 16  # of adapters, if they are needed and no rank is given
# The default of a Trainer: TrainingArguments.optim, which takes seconds to import.
_OPTIMIZER = FUSED if torch.__version__ >= "2.8" else DEFAULT_OPTIMIZER


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence what libraries say of calls that are not the user's, such as deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@_quiet_libraries()
def language_model(
    config: str,
    *,
    seq: int = 0,
    method: str = "",
    lora: int = 0,
    quantize: str = "",
    precision: str = "bf16",
    attention: str = "",
    checkpointing: bool = False,
    targets: str = "all-linear",
    dropout: float = 0.0,
    autocast: bool = True,
    prepare: str = "trl",
    double_quant: bool = True,
    image_size: int = 0,
) -> TrainingSetup:
    """Make the setup to fine-tune a language model as a Trainer of transformers does.

    Args:
        config: a folder with a ``config.json``, that file, or a name on the Hugging Face hub.
        seq: the number of tokens in each example, with those of an image. Default: 2048, or as many
            as the model has positions for.
        method: ``"full"``, ``"lora"``, ``"qlora"``, ``"dpo"``. Default: by ``lora``, ``quantize``.
        lora: the rank of the adapters; 0: 16 if ``method`` or ``quantize`` needs some, else none.
        quantize: ``"4bit"`` (nf4), ``"8bit"``, or ``""`` for no quantization.
        precision: the dtype of the weights and of autocast: bf16, fp16 or fp32. With fp16, the
            trained weights are in fp32.
        attention: ``"eager"``, ``"sdpa"`` or ``"flash"``. Default: sdpa, or eager if the model has
            no sdpa, as transformers chooses.
        checkpointing: keep only the inputs of the layers for the backward pass.
        targets: the names of the layers with adapters, separated by commas.
        dropout: the dropout rate of the adapters.
        autocast: run the forward pass under autocast in this precision.
        prepare: who prepares a quantized model. ``"trl"``: the SFTTrainer of TRL 1, which trains
            the adapters in bf16. ``"peft"``: ``prepare_model_for_kbit_training``, which makes
            embeddings, norms and head fp32. ``"trl0"``: TRL before 1, where only the norms stayed
            fp32. ``"none"``: nothing, with adapters in fp32.
        double_quant: quantize the scales of 4-bit weights too.
        image_size: pixels on each side of the image in each example. Default: what the
            configuration says, or 448; none for a text model.
    """
    _check(method, precision, attention, quantize, prepare)
    is_dpo = method == "dpo"
    quantize = quantize or ("4bit" if method == "qlora" else "")
    rank = lora or (DEFAULT_RANK if method in ("lora", "qlora") or quantize else 0)
    if method == "full" and (lora or quantize):
        raise UsageError("--method full trains all weights. Try it without --lora and --4bit.")
    dtype = torch.float32 if precision == "fp16" and not rank else DTYPES[precision]
    model, task = built(config, dtype, attention)
    if is_dpo and task != "CausalLM":
        raise UsageError(
            "--method dpo is for causal language models. Try --method lora for this one."
        )
    batch = example(model, task, seq, image_size)
    if quantize:
        quantize_weights(model, quantize, dtype, double_quant)
        prepare_weights(model, prepare, dtype)
    if rank:
        model = _with_adapters(model, rank, targets, dropout, TASKS[task])
        if quantize and prepare == "trl":
            cast_adapters(model)
    if checkpointing:
        _checkpoint(model)
    model.train()
    reference = copy.deepcopy(model).requires_grad_(False).eval() if is_dpo and not rank else None
    lower = precision if autocast and precision != "fp32" else None
    setup = TrainingSetup(model, batch, step=LanguageModelStep(lower), optimizer=_OPTIMIZER)
    if is_dpo:
        pair = dict.fromkeys(("chosen", "rejected"), batch["input_ids"])
        return replace(setup, sample=pair, step=PreferenceStep(lower, reference))
    if "image_grid_thw" not in batch:
        return setup
    # The patches of all images follow each other, so an example has many rows.
    return replace(setup, sample=None, make_batch=functools.partial(_repeated, batch))


class LanguageModelStep(StepSource):
    """``step(model, batch) -> loss`` as ``Trainer.training_step`` makes it.

    Args:
        precision: that of autocast in the forward pass, with outputs in fp32; None: no autocast.
    """

    name = "the language model"
    kept_until = KeptUntil.BACKWARD

    def __init__(self, precision: str | None) -> None:
        self.precision = precision

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss that the model computes."""
        with in_precision(model, self.precision):
            loss: Tensor = model(**batch).loss
        return loss


class PreferenceStep(LanguageModelStep):
    """Direct preference optimization, as TRL's DPOTrainer computes it from all logits.

    Without a frozen ``reference``, it is the model without its adapters.
    """

    name = "the DPO loss"

    def __init__(self, precision: str | None, reference: nn.Module | None) -> None:
        super().__init__(precision)
        self._reference = reference

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of pairs of a chosen and a rejected text."""
        ids = torch.cat([batch["chosen"], batch["rejected"]])
        with torch.no_grad():
            without: Any = getattr(model, "disable_adapter", contextlib.nullcontext)
            with without():
                expected = self._log_probabilities(self._reference or model, ids)
        gains = self._log_probabilities(model, ids) - expected
        chosen, rejected = gains.chunk(2)
        loss: Tensor = -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        return loss

    def _log_probabilities(self, model: nn.Module, ids: Tensor) -> Tensor:
        with in_precision(model, self.precision):
            logits = model(input_ids=ids, use_cache=False).logits
        logits, next_ids = logits[:, :-1], ids[:, 1:]
        chosen = logits.gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)
        totals = torch.stack([row.logsumexp(-1) for row in logits])
        total: Tensor = (chosen - totals).sum(-1)
        return total


def _check(method: str, precision: str, attention: str, quantize: str, prepare: str) -> None:
    for option, value, known in (
        ("method", method, ("", *METHODS)),
        ("precision", precision, DTYPES),
        ("attention", attention, ("", *ATTENTION)),
        ("quantize", quantize, ("", "4bit", "8bit")),
        ("prepare", prepare, PREPARED),
    ):
        if value not in known:
            raise UsageError(f"{option} is {' or '.join(filter(None, known))}, not {value!r}")


def _repeated(batch: dict[str, Tensor], batch_size: int) -> dict[str, Tensor]:
    return {name: torch.cat([part] * batch_size) for name, part in batch.items()}


def _with_adapters(model: Any, rank: int, targets: str, dropout: float, task: str | None) -> Any:
    peft = imported("peft")
    names: Any = targets if targets == "all-linear" else targets.split(",")
    config = peft.LoraConfig(r=rank, target_modules=names, lora_dropout=dropout, task_type=task)
    if targets == "all-linear":
        config.exclude_modules = _not_adapted(peft, model, config) or None
    return peft.get_peft_model(model, config)


def _not_adapted(peft: Any, model: Any, config: Any) -> list[str]:
    """Return the linear layers that adapters of all of them would make fail.

    Some layers return more than a tensor, as the router of Llama 4. Mamba's kernels read the weight
    of its output projection, so PEFT refuses that one.
    """
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    plain = nn.Linear.forward
    libraries = (nn.Linear.__module__, "bitsandbytes")
    own = [
        name
        for name, part in linear.items()
        if type(part).forward is not plain and not type(part).__module__.startswith(libraries)
    ]
    head = model.get_output_embeddings()
    if all(part is head or name in own for name, part in linear.items()):
        own = []  # as in Falcon, which has no others
    check = getattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", None)
    try:
        if check is not None:
            check(config, model, "out_proj")
    except ValueError:
        own.append("out_proj")
    return own


def _checkpoint(model: Any) -> None:
    enable: Callable[..., Any] = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    name = enable.__name__.replace("enable", "kwargs")
    enable(**{name: {"use_reentrant": False}})
    model.enable_input_require_grads()


def described(target: str, setup: TrainingSetup, **options: Any) -> list[str]:
    """Return a sentence on the model of a configuration and its training, and what is unusual."""
    model: Any = setup.model
    parameters = [*model.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    config = getattr(model, "peft_config", {}).get("default")
    model = model.get_base_model() if config is not None else model
    parts = [f"{target}: {type(model).__name__}, {trained / 1e6:,.1f} M parameters are trained"]
    if config is not None:
        names = {name.rpartition(".")[2] for name in config.target_modules}
        names |= {*(getattr(config, "target_parameters", None) or ())}  # of experts, for example
        parts.append(f"LoRA of rank {config.r} on {', '.join(sorted(names))}")
    kind = next((k for k in ("4bit", "8bit") if getattr(model, f"is_loaded_in_{k}", False)), "")
    if kind:
        parts.append(f"weights in {kind} ({PREPARED[options.get('prepare', 'trl')]})")
        experts = sum(p.numel() for p in parameters if p.dim() == 3 and p.is_floating_point())
        if experts:
            parts.append(f"{experts / 1e6:,.1f} M of experts stay as they are: no linear layers")
    checkpointing = "with" if options.get("checkpointing") else "without"
    parts.append(f"{options.get('precision', 'bf16')}, as a Trainer runs it")
    parts.append(f"{checkpointing} checkpointing")
    batch: Any = setup.sample or (setup.make_batch(1) if setup.make_batch else {})
    parts += _image_in(batch, model)
    if not parameters[0].is_meta:
        parts.append("random weights")
    return [", ".join(parts), *beyond_positions(model, batch)]


def _image_in(batch: Any, model: Any) -> list[str]:
    """Describe the image in each example, if there is one."""
    if "pixel_values" not in batch:
        return []
    ids, pixels = batch["input_ids"], batch["pixel_values"]
    tokens = int((ids == model.config.image_token_id).sum())
    height, width = pixels.shape[-2:]
    if "image_grid_thw" in batch:
        patch = model.config.vision_config.patch_size
        height, width = (patch * int(side) for side in batch["image_grid_thw"][0, 1:])
    return [
        f"one image of {height} x {width} pixels in each example, {tokens} of {ids.numel()} tokens"
    ]
