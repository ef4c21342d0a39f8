"""Which algorithm can learn from which file, and why another cannot: told by what each one reads (`presets`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .plan_files import EnvFacts, FileFacts
from .presets import PRESETS, Want, looks_for

Way = Literal["data", "trajectories", "env"]

NAMES: dict[Way, str] = {
    "data": "learns from its records",
    "trajectories": "learns from its episodes",
    "env": "samples its tasks",
}


@dataclass(frozen=True, slots=True)
class Route:
    """Whether an algorithm can learn from a file.

    `way` is how, None where it cannot; `extra` are the options that it needs besides; `why` says what keeps it from the
    records themselves, empty where nothing does.
    """

    algo: str
    way: Way | None
    extra: tuple[str, ...] = ()
    why: str = ""


def routes(file: FileFacts) -> list[Route]:
    """Return how each algorithm can learn from a file; none where the file has faults."""
    return [] if file.faults else [_route(algo, file) for algo in PRESETS]


def _route(algo: str, file: FileFacts) -> Route:
    """Try the records first, then the stored episodes, then the env whose tasks they are."""
    reads = PRESETS[algo].reads
    teacher = ("--teacher-model",) if "teacher_model" in reads else ()
    want = looks_for(algo)
    lack = lacks(want, file) if want is not None else ""
    if want is not None and not lack:
        return Route(algo, "data", teacher)
    if "trajectories" in reads:
        unfit = _unsampled(algo, file)
        if not unfit:
            return Route(algo, "trajectories", teacher)
        lack = lack or unfit
    if "env" in reads and file.home is not None:
        return Route(algo, "env", teacher + unpaid(file.home), lack)
    return Route(algo, None, (), lack or "it samples by itself, and no environment of ours has these tasks")


def unpaid(env: EnvFacts) -> tuple[str, ...]:
    """Return the options that an env needs which pays for nothing by itself."""
    return () if env.pays else ("--reward-model",)


def lacks(want: Want, file: FileFacts) -> str:
    """Return what a file lacks of what is wanted; nothing where it has it."""
    stored = file.kind == "trajectories"
    match want:
        case "replies" if not file.replies:
            return "no record says what is to be imitated"
        case "pairs" if not file.pairs and stored:
            return "no two episodes of one group earned different rewards"
        case "pairs" if not file.pairs:
            return "no record has two replies, one better than the other"
        case "labels" if not file.good + file.bad:
            return "no reply is said to be good or bad"
        case "labels" if not (file.good and file.bad):
            return f"every reply that is judged is {'good' if file.good else 'bad'}, and both are needed"
    return ""


def _unsampled(algo: str, file: FileFacts) -> str:
    """Return why the episodes of a file cannot be learnt from as a policy's own; nothing where they can."""
    if file.kind != "trajectories":
        return "a recorded answer has no log-probs"
    if file.sampled < file.episodes or not file.sampled:
        return f"{file.episodes - file.sampled} of {file.episodes} scored episodes have no log-probs of a policy"
    if "min_group_size" in PRESETS[algo].reads and not file.groups:
        return "no task was sampled twice, and groups are compared"
    return ""


def by_reason(found: Iterable[Route]) -> list[tuple[str, list[str], str]]:
    """Return `(how, algorithms, why)` rows, algorithms that share how and why in one; closed routes last."""
    rows: dict[tuple[Way | None, tuple[str, ...], str], list[str]] = {}
    for route in found:
        rows.setdefault((route.way, route.extra, route.why), []).append(route.algo)
    told = []
    for way in ("data", "trajectories", "env", None):
        for (where, extra, why), algos in rows.items():
            if where == way:
                how = f"{NAMES[where]}{', with ' + ' '.join(extra) if extra else ''}" if where else "cannot"
                told.append((how, algos, why))
    return told
