"""LightningModules, Trainers of transformers, and models with example inputs of their own.

No framework is imported: its objects are recognized by their methods.

- A LightningModule trains by its ``training_step`` with the optimizer from its
  ``configure_optimizers``; manual optimization works too. Its Trainer, callbacks and other hooks do
  not run. Give a ``step`` if those two methods need the Trainer.
- A ``transformers.Trainer`` (or a subclass, such as TRL's ``SFTTrainer``) brings model, loss,
  optimizer, precision, checkpointing, accumulation and data. ``trainer.train()`` is not called, so
  no callback, log or checkpoint is made. Trainers are refused if they shard by DeepSpeed or FSDP,
  or train on text that the model generates (GRPO).
- timm, Transformers and Lightning models may carry an example input, used if there is no sample.

Read ``model_hints``, ``lightning``, ``manual_optimization``, ``transformers_trainer``, then
``trainer_batch``. May import ``training``'s own files, ``units`` and ``errors``.
"""

METHODS = ("full", "lora", "qlora", "dpo")
"""The ways to train a language model."""

ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "batchfinder_unmasked"}
"""Its attention kernels, and their names in transformers. The command line also reads these."""
