from __future__ import annotations

import re
import traceback

from batchfinder import errors
from batchfinder.errors import BatchFinderError, UsageError, UserCodeError

ALL = {
    name: thing
    for name, thing in vars(errors).items()
    if isinstance(thing, type) and issubclass(thing, BatchFinderError)
}


def test_the_docstring_tree_names_every_class() -> None:
    tree = (errors.__doc__ or "").split("::")[1].split("\n\n")[1]
    named = [re.sub(r"^[ │├└─]*", "", line).split()[0] for line in tree.splitlines()]
    assert sorted(named) == sorted(ALL)
    assert named[0] == "BatchFinderError"


def test_every_error_is_a_batchfinder_error() -> None:
    classes = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    } - {"BatchFinderWarning"}
    assert classes == set(ALL)


def test_a_usage_error_is_a_value_error_with_exit_status_2() -> None:
    assert issubclass(UsageError, ValueError)
    codes = {name: error.exit_code for name, error in ALL.items()}
    assert codes == {name: 2 if name == "UsageError" else 1 for name in ALL}


def test_the_user_traceback_is_shown_as_the_cause() -> None:
    error = UserCodeError("ValueError: no", "Traceback ...")
    assert str(error) == "ValueError: no"
    assert error.user_traceback == "Traceback ..."
    assert UserCodeError("x").user_traceback == ""
    # An uncaught error prints its cause first.
    shown = "".join(traceback.format_exception(error))
    assert shown.index("Traceback ...") < shown.index("UserCodeError: ValueError: no")
