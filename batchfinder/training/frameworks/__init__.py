"""LightningModules, Trainers of transformers, and models with example inputs of their own.

No framework is imported: its objects are recognized by their methods.

- A LightningModule is trained by its ``training_step`` with the optimizer from its
  ``configure_optimizers``, by hand too; its Trainer, callbacks and other hooks are not run. Give a
  ``step`` where those two methods need the Trainer.
- A ``transformers.Trainer`` (or a subclass, such as TRL's ``SFTTrainer``) brings model, loss,
  optimizer, precision, checkpointing, accumulation and data. ``trainer.train()`` is not called: no
  callback, no log, no checkpoint. Trainers that shard by DeepSpeed or FSDP, or that train on what
  the model generates (GRPO), are refused.
- timm, Transformers and Lightning models may carry an example input, used if there is no sample.

Read ``model_hints``, ``lightning``, ``manual_optimization``, ``transformers_trainer``, then
``trainer_batch``. May import ``training``'s own files, ``units`` and ``errors``.
"""
