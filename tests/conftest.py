"""What holds for every test.

How hard Hypothesis tries: as usual, or, in the nightly form, with 2000 examples a property; and
that Ctrl-C works in the programs that the tests start.
"""

from __future__ import annotations

import signal

from hypothesis import settings

# A machine that is busy with something else is no failure of ours.
settings.register_profile("usual", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("usual")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would be every program
# that the tests start, by inheritance.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
