"""The parts of a training step: the target, the sample, the loss, the optimizer, the state.

Read ``setup``, ``target``, ``sample``, ``calling``, ``loss``, ``step``, ``complete_setup``, then
``state`` and ``frameworks``. May import ``units`` and ``errors``; knows no device, prober or
search.
"""
