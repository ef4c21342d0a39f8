"""Metrics of a step, under the names that TRL's users know."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from ..agents.trajectory import Trajectory
from .advantages import group_stats

_NO_FAILURE = ("ok", "truncated")


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return what the episodes of a step say: reward and its parts, lengths, endings, tools.

    `completions/*` count sampled tokens of an episode; `tools/call_frequency` is calls an episode,
    `tools/failure_frequency` the share of calls that failed. Episodes that failed for reasons that are not the
    agent's are in `episodes/failed` and nowhere else.
    """
    whole = [t for t in trajectories if t.error is None]
    values: dict[str, float] = {"episodes/failed": float(len(trajectories) - len(whole))}
    if not whole:
        return values
    stats = group_stats([t.reward for t in whole], [t.group_id for t in whole])
    for name in ("reward", "reward_std", "frac_reward_zero_std"):
        value = getattr(stats, name)
        if value is not None:
            values[name] = value
    for name in sorted({name for t in whole for name in t.rewards}):
        parts = [part for t in whole if (part := t.rewards.get(name, 0.0)) is not None]
        if parts:
            values[f"rewards/{name}/mean"], values[f"rewards/{name}/std"] = fmean(parts), pstdev(parts)
    values["episodes/broken"] = float(sum(bool(t.broken) for t in whole))
    values["success"] = fmean(t.success is True for t in whole)
    return values | _lengths(whole) | _tools(whole)


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [t.sampled_tokens for t in trajectories]
    return {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(t.truncated for t in trajectories),
        "episodes/mean_turns": fmean(len(t.turns) for t in trajectories),
    }


def _tools(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    uses = [use.outcome for t in trajectories for turn in t.turns for use in turn.tools]
    values = {"tools/call_frequency": len(uses) / len(trajectories)}
    failed = [outcome for outcome in uses if outcome not in _NO_FAILURE]
    values["tools/failure_frequency"] = len(failed) / len(uses) if uses else 0.0
    for outcome in sorted(set(failed)):
        values[f"tools/{outcome}"] = failed.count(outcome) / len(uses)
    return values
