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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder.errors import TargetError, UsageError
from batchfinder.training.frameworks.quantization import (
    PREPARED,
    cast_adapters,
    imported,
    prepare_weights,
    quantize_weights,
)
from batchfinder.training.frameworks.transformers_trainer import in_precision
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.source import KeptUntil, StepSource
from batchfinder.training.user_module import PREFIX

METHODS = ("full", "lora", "qlora", "dpo")
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "batchfinder_unmasked"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_RANK = 16  # of adapters, if they are needed and no rank is given
DEFAULT_SEQ = 2048  # tokens in each example


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
    seq: int = DEFAULT_SEQ,
    method: str = "",
    lora: int = 0,
    quantize: str = "",
    precision: str = "bf16",
    attention: str = "sdpa",
    checkpointing: bool = False,
    targets: str = "all-linear",
    dropout: float = 0.0,
    autocast: bool = True,
    prepare: str = "trl",
    double_quant: bool = True,
) -> TrainingSetup:
    """Make the setup to fine-tune a causal language model as a Trainer of transformers does.

    Args:
        config: a folder with a ``config.json``, that file, or a name on the Hugging Face hub.
        seq: the number of tokens in each example.
        method: ``"full"``, ``"lora"``, ``"qlora"``, ``"dpo"``. Default: by ``lora``, ``quantize``.
        lora: the rank of the adapters; 0: 16 if ``method`` or ``quantize`` needs some, else none.
        quantize: ``"4bit"`` (nf4), ``"8bit"``, or ``""`` for no quantization.
        precision: the dtype of the weights and of autocast: bf16, fp16 or fp32. With fp16, the
            trained weights are in fp32.
        attention: ``"eager"``, ``"sdpa"`` or ``"flash"``.
        checkpointing: keep only the inputs of the layers for the backward pass.
        targets: the names of the layers with adapters, separated by commas.
        dropout: the dropout rate of the adapters.
        autocast: run the forward pass under autocast in this precision.
        prepare: who prepares a quantized model. ``"trl"``: the SFTTrainer of TRL 1, which trains
            the adapters in bf16. ``"peft"``: ``prepare_model_for_kbit_training``, which makes
            embeddings, norms and head fp32. ``"trl0"``: TRL before 1, where only the norms stayed
            fp32. ``"none"``: nothing, with adapters in fp32.
        double_quant: quantize the scales of 4-bit weights too.

    Raises:
        UsageError: an option is unknown.
        TargetError: a library is missing, or there is no such configuration.
    """
    _check(method, precision, attention, quantize, prepare)
    is_dpo = method == "dpo"
    quantize = quantize or ("4bit" if method == "qlora" else "")
    rank = lora or (DEFAULT_RANK if method in ("lora", "qlora") or quantize else 0)
    if method == "full" and (lora or quantize):
        raise UsageError("--method full trains all weights. Try it without --lora and --4bit.")
    dtype = torch.float32 if precision == "fp16" and not rank else _DTYPES[precision]
    model = _made(config, dtype, ATTENTION[attention])
    if quantize:
        quantize_weights(model, quantize, dtype, double_quant)
        prepare_weights(model, prepare, dtype)
    if rank:
        model = _with_adapters(model, rank, targets, dropout)
        if quantize and prepare == "trl":
            cast_adapters(model)
    if checkpointing:
        _checkpoint(model)
    model.train()
    reference = copy.deepcopy(model).requires_grad_(False).eval() if is_dpo and not rank else None
    lower = _DTYPES[precision] if autocast and precision != "fp32" else None
    ids = torch.zeros(1, seq, dtype=torch.int64, device="cpu")
    if is_dpo:
        step: StepSource = PreferenceStep(lower, reference)
        return TrainingSetup(model, {"chosen": ids, "rejected": ids}, step=step)
    return TrainingSetup(model, {"input_ids": ids, "labels": ids}, step=LanguageModelStep(lower))


class LanguageModelStep(StepSource):
    """``step(model, batch) -> loss`` as ``Trainer.training_step`` makes it.

    Args:
        lower: the dtype of autocast in the forward pass, with outputs in fp32; None: no autocast.
    """

    name = "the language model"
    kept_until = KeptUntil.BACKWARD

    def __init__(self, lower: torch.dtype | None) -> None:
        self._lower = lower
        self.precision = next((name for name, each in _DTYPES.items() if each is lower), None)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss that the model computes."""
        with in_precision(model, self._lower):
            loss: Tensor = model(**batch).loss
        return loss

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Return the loss, which is all that the step returns."""
        loss: Tensor = output
        return loss


class PreferenceStep(LanguageModelStep):
    """Direct preference optimization, as TRL's DPOTrainer computes it from all logits.

    Args:
        lower: the dtype of autocast; None: no autocast.
        reference: the frozen model; None: the model without its adapters.
    """

    name = "the DPO loss"

    def __init__(self, lower: torch.dtype | None, reference: nn.Module | None) -> None:
        super().__init__(lower)
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
        with in_precision(model, self._lower):
            logits = model(input_ids=ids, use_cache=False).logits
        logits, next_ids = logits[:, :-1], ids[:, 1:]
        chosen = logits.gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)
        totals = torch.stack([row.logsumexp(-1) for row in logits])
        total: Tensor = (chosen - totals).sum(-1)
        return total


def _check(method: str, precision: str, attention: str, quantize: str, prepare: str) -> None:
    for option, value, known in (
        ("method", method, ("", *METHODS)),
        ("precision", precision, _DTYPES),
        ("attention", attention, ATTENTION),
        ("quantize", quantize, ("", "4bit", "8bit")),
        ("prepare", prepare, PREPARED),
    ):
        if value not in known:
            raise UsageError(f"{option} is {' or '.join(filter(None, known))}, not {value!r}")


def _made(config: str, dtype: torch.dtype, attention: str) -> Any:
    transformers = imported("transformers")
    path = Path(config).expanduser()
    place = path.parent if path.is_file() else path
    if path.suffix == ".json" and not path.exists():  # no name on the hub ends so
        raise TargetError(
            f"there is no file {config}. Try {PREFIX}FOLDER with a config.json in it."
        )
    try:
        known = transformers.AutoConfig.from_pretrained(str(place if place.exists() else config))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"there is no configuration {config} ({reason}). Try {PREFIX}FOLDER with the model's "
            "config.json in it."
        ) from error
    known.use_cache = False
    if attention == ATTENTION["flash"]:
        transformers.AttentionInterface.register(attention, _flash_attention)
        transformers.AttentionMaskInterface.register(attention, lambda *_, **__: None)
    try:
        return transformers.AutoModelForCausalLM.from_config(
            known, dtype=dtype, attn_implementation=attention
        )
    except ValueError as error:
        reason = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"no causal language model from {config}: {reason} Try FILE.py:FUNCTION with a "
            "function that returns (model, sample)."
        ) from error


def _flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run PyTorch's copy of FlashAttention, with no mask and without repeating grouped keys."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def _with_adapters(model: Any, rank: int, targets: str, dropout: float) -> Any:
    peft = imported("peft")
    names: Any = targets if targets == "all-linear" else targets.split(",")
    config = peft.LoraConfig(
        r=rank, target_modules=names, lora_dropout=dropout, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def _checkpoint(model: Any) -> None:
    enable: Callable[..., Any] = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    name = enable.__name__.replace("enable", "kwargs")
    enable(**{name: {"use_reentrant": False}})
    model.enable_input_require_grads()


def maker_of(target: str) -> Callable[..., TrainingSetup]:
    """Return the function that makes the setup of an ``hf:`` target from its options."""
    return functools.partial(language_model, target.removeprefix(PREFIX))


def described(target: str, setup: TrainingSetup, **options: Any) -> str:
    """Return a sentence that describes the model of a configuration and its training."""
    model: Any = setup.model
    parameters = [*model.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    parts = [f"{target}: {trained / 1e6:,.1f} M parameters are trained"]
    config = getattr(model, "peft_config", {}).get("default")
    if config is not None:
        layers = ", ".join(sorted({name.rpartition(".")[2] for name in config.target_modules}))
        parts.append(f"LoRA of rank {config.r} on {layers}")
    model = model.get_base_model() if config is not None else model
    parts += (
        f"weights in {kind} ({PREPARED[options.get('prepare', 'trl')]})"
        for kind in ("4bit", "8bit")
        if getattr(model, f"is_loaded_in_{kind}", False)
    )
    checkpointing = "with" if options.get("checkpointing") else "without"
    parts.append(f"{options.get('precision', 'bf16')}, as a Trainer runs it")
    parts.append(f"{checkpointing} checkpointing")
    if not parameters[0].is_meta:
        parts.append("random weights")
    return ", ".join(parts)
