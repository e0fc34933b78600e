"""Recorded steps of real confirmations, replayed at other sizes, for longer and in other orders.

Read ``pairing``, ``scaled``, ``lasting``, ``side_by_side`` (several processes), ``guess``, then
``longer`` (batches that vary in length).
May import ``probing``, ``search``, ``results`` and ``units``. No torch.
"""
