"""Find, save and restore the state that training steps change.

Read ``snapshot``, ``reach``, ``undo``, ``process_settings``, ``anatomy`` in this order. May import
``errors`` only.
"""
