"""Remember the answers of a command's searches. A failure here is only a warning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchfinder.cli.output import typed
from batchfinder.errors import CacheError
from batchfinder.probing.code import surroundings
from batchfinder.results.cache import AnswerCache
from batchfinder.results.remembered import Remembered
from batchfinder.results.result import BatchSizeResult
from batchfinder.results.version import VERSION
from batchfinder.search.prober import Prober


class SearchMemory:
    """The remembered answers of one command, by everything that they depend on.

    :meth:`recall` may add more of these facts, which are plain data. A memory that ``is_off``
    recalls and keeps nothing.

    Attributes:
        key: the hash of all facts; "" before :meth:`recall`.
    """

    def __init__(self, facts: Callable[[], Mapping[str, Any]], *, is_off: bool = False) -> None:
        self._warnings: list[str] = []
        self._facts: dict[str, Any] = {}
        self._cache = None if is_off else AnswerCache()
        if self._cache:  # some facts are digests of files
            self._facts |= {**facts(), "batchfinder": VERSION, "settings": surroundings()}
        self.key = ""

    def newest_size(self) -> int | None:
        """Return the newest answer by the facts known before :meth:`recall`; None without one."""
        if self._cache is None:
            return None
        known = self._plain_facts()
        try:
            answers = self._cache.answers()
        except CacheError as error:
            self._give_up(error)
            return None
        found = (answer.remembered() for answer in answers if known.items() <= answer.facts.items())
        return next((each.batch_size for each in found if each), None)

    def recall(self, prober: Prober, further: Callable[[], Mapping[str, Any]]) -> Remembered | None:
        """Return the answer of an earlier search on as much memory; None if there is none.

        The answer depends on the prober's device, and on the further facts. If one of them is None,
        it could not be read, so nothing is recalled or remembered.
        """
        if self._cache is None or None in (facts := further()).values():
            return None
        self._facts |= {"device": prober.device, "versions": dict(prober.versions), **facts}
        text = json.dumps(self._facts, sort_keys=True, default=str)
        self.key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        self._facts["budget_bytes"] = prober.budget_bytes  # steps may lower it; others change it
        try:
            answer = self._cache.recall(self.key)
        except CacheError as error:
            self._give_up(error)
            return None
        found = answer.remembered() if answer else None
        if found and found.suits(prober.budget_bytes, is_repeatable=prober.is_repeatable):
            return found
        return None

    def keep(self, result: BatchSizeResult) -> BatchSizeResult:
        """Save the answer, unless it was remembered. Return it, with a warning on a failure."""
        is_new = result.remembered_from is None and Remembered.is_worth_it(result)
        if self._cache is not None and self.key and is_new:
            try:
                self._cache.remember(self.key, typed(), self._plain_facts(), result.to_dict())
            except CacheError as error:
                self._give_up(error)
        return replace(result, warnings=(*result.warnings, *self._warnings))

    def _plain_facts(self) -> dict[str, Any]:
        """Return the facts as they are once they have been saved."""
        facts: dict[str, Any] = json.loads(json.dumps(self._facts, default=str))
        return facts

    def _give_up(self, error: CacheError) -> None:
        self._cache = None
        self._warnings.append(f"the answer is not remembered: {error}")
