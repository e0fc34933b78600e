"""The command ``estimate``, and what the other commands that estimate share with it.

Read ``estimate``, then ``levers`` (what to change if nothing fits). ``check`` and ``studies``
import from here, never the other way round.
"""
