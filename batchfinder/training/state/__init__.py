"""Find, save and restore the state that training steps change.

Read ``snapshot``, ``reach``, ``undo``, ``process_settings``, ``anatomy`` in this order; by itself
``patching``. May import ``errors`` only.
"""
