"""Comparisons of strategies, and sweeps over lengths: many searches with one result.

Read ``strategies``, ``checkpointing``, ``apply_strategy``, ``comparison``, ``comparison_request``,
``estimate_strategies``, ``measure_strategies``, then ``compare``; for sweeps ``scaling``,
``size_sweep``, ``sweep_result``, ``sweep_values``, then ``sweep``, and ``worst_batch``; by itself
``noise_scale``.
"""
