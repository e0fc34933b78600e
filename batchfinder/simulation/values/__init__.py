"""The values of tensors without data, as far as they are known.

Read ``known``, ``assumptions``, ``shapes``, ``values`` in this order.
"""
