"""The state that training steps change: how it is found, saved and restored.

Read ``snapshot``, ``reach``, ``undo``, ``process_settings``, ``anatomy`` in this order. May import
``errors`` only.
"""
