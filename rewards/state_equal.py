"""The checker `state_equal`: the world that the tools left behind is the wanted one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from .checker import Checker, Verdict
from .episode import Episode
from .json_equal import check_json, differences, near_misses, summary


class StateEqual(Checker):
    """Right when the env's state equals `gt`, by the rules of `json_equal`; what the agent says counts for nothing.

    With `partial`, only the keys that `gt` names must match, at every level; lists still match as a whole.
    """

    positives: ClassVar[tuple[tuple[Any, Any], ...]] = (
        ({"/a.txt": "hello", "/b.txt": ""}, {"/b.txt": "", "/a.txt": "hello"}),
        ({"cart": [{"id": 7, "count": 2.0}]}, {"cart": [{"id": 7, "count": 2}]}),
        ({"on": True, "owner": None}, {"on": True, "owner": None}),
    )
    negatives: ClassVar[tuple[tuple[Any, Any], ...]] = (
        ({}, {"/a.txt": "hello"}),
        ({"/a.txt": "hello", "/b.txt": "x"}, {"/a.txt": "hello"}),
        ({"/a.txt": "hello there"}, {"/a.txt": "hello"}),
        ({"/A.txt": "hello"}, {"/a.txt": "hello"}),
        ({"on": 1}, {"on": True}),
        ({"cart": [2, 1]}, {"cart": [1, 2]}),
        ("/a.txt: hello", {"/a.txt": "hello"}),
    )

    reads = "state"

    def __init__(self, *, partial: bool = False) -> None:
        self.partial = partial

    def verdict(self, answer: Any, gt: Any) -> Verdict:
        """Judge the state `answer`; the detail names the first paths that differ.

        Raises ValueError when `gt` is not JSON, and when a partial `gt` names nothing (-> `broken`).
        """
        check_json(gt, "gt")
        if self.partial and gt == {}:
            raise ValueError("a partial gt must name at least one key, got {}")
        detail = summary(differences(answer, gt, extra_keys=self.partial))
        return Verdict.of(not detail, detail)

    def judge(self, episode: Episode) -> Verdict:
        """Judge the state that the episode left. Raises ValueError where its env has none (-> `broken`)."""
        state = episode.state()
        if state is None:
            raise ValueError("the env has no state: override ChatEnv.state")
        return self.verdict(state, episode.gt)

    def attacks(self, gt: Any) -> Iterator[tuple[str, Any]]:
        """Yield states that are nearly the wanted one."""
        yield from [("nothing", None), ("told, not done", json.dumps(gt))]
        yield from [("empty", {})] * (gt != {})
        for kind, state in near_misses(gt):
            if not (self.partial and kind == "an extra key"):
                yield kind, state
