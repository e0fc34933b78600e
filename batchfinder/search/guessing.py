"""The moves of a search that guesses its answer: what to record for the guess, then the guess."""

from __future__ import annotations

import math

from batchfinder.search.belief import APART, end_from_zero, lines_of
from batchfinder.search.bracket import ERRORS, Bracket
from batchfinder.search.head_start import Guess, MakeGuess
from batchfinder.search.plan import (
    MEASURED_GROWTH,
    SECOND_GROWTH,
    Move,
    Prices,
    move_to,
)

# The largest size that is confirmed only to record it, as a share of the predicted answer: without
# and with expensive launches.
REHEARSED = 1 / 8
LARGEST_REHEARSED = 1 / 2

# While a guess is unsure, another size is recorded: at most this share of the guess, and no more
# than this many in all.
RECORDED_AGAIN, MOST_RECORDED = 1 / 3, 4


class Guessing:
    """Turns guesses of the answer into moves.

    Args:
        guess: guesses the answer; None if nothing does.
        prices: the costs of moves.
        replays: True if guesses come from recordings of this search, and get better with it.

    Attributes:
        estimate: the guess that the search still believes in; None if there is none.
    """

    def __init__(self, guess: MakeGuess | None, prices: Prices, *, replays: bool) -> None:
        self._guess, self._prices, self._replays = guess, prices, replays
        # How often a size above a guess was tried next to it, and since which failure that counts.
        self._beats, self._high = 0, 0
        self.estimate: Guess | None = None

    def move(self, known: Bracket, opening: Move | None) -> Move | None:
        """Return the next move; None to plan it.

        Args:
            known: the bracket so far.
            opening: the move of a search without guesses, if there is nothing to weigh.
        """
        has_failed = known.failure is not None
        is_spent = has_failed and not self._replays
        if known.errors >= ERRORS:
            self.estimate, is_spent = None, True
        if self._guess is None or is_spent or (opening and (has_failed or not self._replays)):
            return opening
        found = self._guess(known.failure)
        if self._replays and not has_failed:
            # If a launch costs more than its steps, larger steps are recorded at once.
            share = min(LARGEST_REHEARSED, REHEARSED * (1 + self._prices.launch))
            opening = _size_to_record(known, share, found) or opening
        if opening:
            return opening
        # Lines know more than a guess that was beaten, until a recording of a larger size does. But
        # once a confirmation has refuted a probe, they do not see the later steps, as guesses do.
        if known.refuted and known.high != self._high:
            self._beats, self._high = 0, known.high
        is_beaten = self._beats and not known.refuted
        if found and is_beaten and found.size < known.low + known.resolution_at(known.low):
            self.estimate = None
            return None
        move = self._at(known, found) if found else None
        if move or not (has_failed and found):
            self.estimate = found if move else None
            # Guess again later: recordings of a larger size are more exact.
            self._guess = self._guess if self._replays and (move or not found) else None
        return move

    def _at(self, known: Bracket, guess: Guess) -> Move | None:
        """Return the confirmation of a guess, or of a size near it that tells more; or None."""
        size, low = guess.size, known.low
        is_cheap = 2 * low <= RECORDED_AGAIN * size and len(known.confirmed) < MOST_RECORDED
        if is_cheap and not guess.is_sure:
            return move_to(known, 2 * low, confirm=True)
        resolution = known.resolution_at(low)
        if self._replays and low in known.confirmed and size - low < resolution:
            # Confirm the size above: recordings distinguish it from this one, a probe does not. How
            # far off a guess is that was beaten several times is not known.
            reach = resolution * 2**self._beats
            self._beats += 1
            return move_to(known, low + reach, confirm=True)
        if 0 < known.high - size <= known.resolution and known.failure:
            size = known.high - known.resolution  # ends the search if it fits
        # The tensors' line leaves no room for a larger answer, but recordings know better.
        most = known.high if self._replays else min(known.high, lines_of(known)[0].end + 1)
        return move_to(known, size, confirm=True) if low < size < most else None


def _size_to_record(known: Bracket, share: float, guess: Guess | None) -> Move | None:
    """Return the next of two or three small sizes to confirm, so that their requests are recorded.

    Steps of larger sizes are more like those at the answer. At an eighth of the predicted answer,
    all recorded steps together cost less than a full-size step.

    Args:
        known: the bracket so far.
        share: the largest of these sizes, as a share of the predicted answer.
        guess: the answer by the recordings so far; None if they do not determine it.
    """
    if not known.ran or known.bounds.first == known.bounds.last:
        return None  # nothing can be recorded, or needs to be
    # At a small size, the peak may be at a moment that hardly grows with the batch. A replay finds
    # the one that becomes the peak.
    recorded, end = len(known.confirmed), lines_of(known)[0].end
    end = min(end, guess.size) if guess else end
    if math.isinf(end) and len(known.readings) == 1:
        end = end_from_zero(known)
    is_far = 2 * known.ran <= (share if recorded == 2 else 1) * end
    if math.isinf(end) or not is_far or recorded > 2:
        return None
    growth = MEASURED_GROWTH if recorded == 2 else SECOND_GROWTH
    size = known.bounds.at_most(min(share * end, known.ran * growth))
    if size <= known.ran:
        next_size = known.bounds.after(int(known.ran / APART))  # nothing is guessed of nearer ones
        is_small = 3 * next_size <= end or known.bounds.first in known.confirmed
        size = next_size if is_small else known.bounds.first
    return Move(size, True) if size < min(end, known.high) else None
