"""How hard Hypothesis tries: as usual, or, in the nightly form, with 2000 examples a property."""

from __future__ import annotations

from hypothesis import settings

# A machine that is busy with something else is no failure of ours.
settings.register_profile("usual", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("usual")
