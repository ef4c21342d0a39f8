"""What a step learnt from, for people: decoded episodes with mask, rewards and advantages; whole batches that broke."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Any

from ..agents.backend import derive_seed
from .experience import Experience

Decode = Callable[[list[int]], str]


def debug_samples(step: int, experiences: Sequence[Experience], decode: Decode, seed: int) -> list[dict[str, Any]]:
    """Return the step's best and worst episode and one at random (a function of `seed` and `step`), decoded.

    `decode` gives the text of ids, special tokens too. One episode may be several of the three; it is told of once.
    """
    chosen: dict[str, Experience] = {}
    known = [one for one in experiences if one.reward is not None]
    if known:
        chosen["best"] = max(known, key=lambda one: one.reward or 0.0)
        chosen["worst"] = min(known, key=lambda one: one.reward or 0.0)
    if experiences:
        chosen["random"] = Random(derive_seed(seed, "debug", step)).choice(list(experiences))
    reasons: dict[int, list[str]] = {}
    for why, experience in chosen.items():
        reasons.setdefault(id(experience), []).append(why)
    unique = {id(experience): experience for experience in chosen.values()}
    return [{"step": step, "why": reasons[key]} | describe(one, decode) for key, one in unique.items()]


def describe(experience: Experience, decode: Decode) -> dict[str, Any]:
    """Return one episode: `prompt`, then `response` in pieces of one mask; only pieces of mask 1 have advantages.

    `reward` is what credit saw, `rewards` its components, `turn_rewards` what each turn earned. `advantages` is one
    number where all tokens of a piece have the same. Text is decoded from the tokens that the loss sees.
    """
    trajectory = experience.trajectory
    prompt, *response = [*_pieces(experience, decode)] or [{"mask": 0, "text": ""}]
    if prompt["mask"]:  # nothing stands before what the agent said
        prompt, response = {"text": ""}, [prompt, *response]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "gt": trajectory.gt,
        "reward": experience.reward,
        "rewards": trajectory.rewards,
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason,
        "error": trajectory.error,
        "prompt": prompt["text"],
        "response": response,
    }


def _pieces(experience: Experience, decode: Decode) -> Iterator[dict[str, Any]]:
    trajectory = experience.trajectory
    advantages = dict(zip(experience.places, experience.advantages, strict=True))
    for segment, (start, end) in enumerate(trajectory.segments):
        for mask, run in groupby(range(start, end), key=trajectory.response_mask.__getitem__):
            places = list(run)
            piece: dict[str, Any] = {"mask": mask, "text": decode([trajectory.tokens[t] for t in places])}
            if segment:
                piece["segment"] = segment
            if mask:
                given = [advantages[t] for t in places]
                piece["advantages"] = given[0] if len(set(given)) == 1 else given
            yield piece


def whole_batch(experiences: Sequence[Experience]) -> Iterator[dict[str, Any]]:
    """Yield each trajectory with every number that the loss read: lists of one number a trainable token.

    A number that is not finite is written `NaN` or `Infinity`, which Python's `json` reads back.
    """
    for experience in experiences:
        yield {
            "reward": experience.reward,
            "temperature": experience.temperature,
            "places": experience.places,
            "advantages": experience.advantages,
            "returns": experience.returns,
            "sampler_logprobs": experience.sampler_logprobs,
            "old_logprobs": experience.old_logprobs,
            "ref_logprobs": experience.ref_logprobs,
            "weights": experience.weights,
            "values": experience.values,
            "trajectory": experience.trajectory.model_dump(mode="json"),
        }
