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


def test_the_tree_in_the_docstring_names_exactly_the_classes_there_are() -> None:
    tree = (errors.__doc__ or "").split("::")[1].split("\n\n")[1]
    named = [re.sub(r"^[ │├└─]*", "", line).split()[0] for line in tree.splitlines()]
    assert sorted(named) == sorted(ALL)
    assert named[0] == "BatchFinderError"


def test_every_error_of_ours_can_be_caught_as_one() -> None:
    classes = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    } - {"BatchFinderWarning"}
    assert classes == set(ALL)
    assert classes == set(ALL)


def test_a_senseless_argument_is_a_value_error_too_and_exits_with_two() -> None:
    assert issubclass(UsageError, ValueError)
    codes = {name: error.exit_code for name, error in ALL.items()}
    assert codes == {name: 2 if name == "UsageError" else 1 for name in ALL}


def test_the_users_own_traceback_travels_with_the_error() -> None:
    error = UserCodeError("ValueError: no", "Traceback ...")
    assert str(error) == "ValueError: no"
    assert error.user_traceback == "Traceback ..."
    assert UserCodeError("x").user_traceback == ""
    # As a script sees it that does not catch it.
    shown = "".join(traceback.format_exception(error))
    assert shown.index("Traceback ...") < shown.index("UserCodeError: ValueError: no")
