"""Trajectory: the one currency. What an agent did in one episode, token by token, and what it earned.

Tokens enter through two doors only: `append_context` (template and env: mask 0) and `append_turn` (the agent: mask 1).
The mask is born with the token and never derived from token values. History is never rewritten; where a chat template
cannot continue a history, a new segment begins (its own ids and mask, the same episode).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    computed_field,
    model_validator,
)

from ..tools.messages import Message

SCHEMA_VERSION: Final = 1

#: Finish reasons of actions that say something; the others are sent by the driver in the agent's place.
SPOKEN: Final = ("stop", "length")

#: A key nobody reads is an error. Numbers that are not finite are written as what they are and refused when read.
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class ToolUse(BaseModel):
    """One tool call as it ended: which tool, which outcome, how long (seconds)."""

    model_config = _STRICT
    name: str
    outcome: str
    seconds: float = 0.0


class Turn(BaseModel):
    """One action of the agent: tokens `[start, end)` of the trajectory, why it ended and what the env made of it.

    `reward` is what this turn earned (a later env answer may add to the last turn); `seconds` is the wall time of
    sampling (`generate`) and of the env's step. `policy_version` is that of the oldest weights that sampled any of it;
    `policy_spans` (version, start, end), counted in the trajectory's tokens, stand there where several did.
    """

    model_config = _STRICT
    start: int
    end: int
    text: str
    finish_reason: str
    policy_version: int | None = None
    policy_spans: list[tuple[int, int, int]] = Field(default_factory=list)
    reward: float = 0.0
    tools: list[ToolUse] = Field(default_factory=list)
    generate_seconds: float = 0.0
    step_seconds: float = 0.0


class Sampling(BaseModel):
    """How the tokens were drawn. Log-probs are those of the full softmax at `temperature` (1 when it is 0: greedy)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 is off")
    min_p: float = Field(default=0.0, ge=0, le=1, description="least probability, as a share of the likeliest token's")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="strings that end a turn; they stay in its text, which is what its ids say"
    )
    max_new_tokens: int = Field(default=256, ge=1, description="sampled tokens a turn")


class _Messages(BaseModel):
    messages: list[Message]


class Trajectory(BaseModel):
    """One episode. `tokens`, `response_mask` and `logprobs` have equal lengths, checked before every append.

    `logprobs` is None where the mask is 0, and where an agent wrote the token without sampling it (an expert): SFT
    takes such tokens, RL refuses them. `reward` is the sum over turns, None when the episode failed for reasons
    that are not the agent's (`error`) or when nothing could be scored (`broken`).
    """

    model_config = _STRICT

    schema_version: Literal[1] = SCHEMA_VERSION
    trajectory_id: str
    group_id: str
    task_id: str
    env_id: str
    task_index: int
    sample: int = 0
    seed: int = 0
    agent: str = "model"
    sampling: Sampling | None = None
    tokenizer: str | None = None  # fingerprint of tokenizer and template behind `tokens`
    gt: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    tokens: list[int] = Field(default_factory=list)
    response_mask: list[Literal[0, 1]] = Field(default_factory=list)
    logprobs: list[float | None] = Field(default_factory=list)
    segment_starts: list[int] = Field(default_factory=list)

    messages: list[Message] = Field(default_factory=list)
    prompt_messages: int | None = None  # how many of them are the task's own; older files: those before an assistant's
    tools: str = "[]"
    turns: list[Turn] = Field(default_factory=list)
    rewards: dict[str, float | None] = Field(default_factory=dict)
    success: bool | None = None
    terminated: bool = False
    truncated: bool = False
    stop_reason: str | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        length, starts = len(self.tokens), self.segment_starts
        if not length == len(self.response_mask) == len(self.logprobs):
            raise ValueError(
                f"tokens, response_mask and logprobs must be equally long, got "
                f"{length}, {len(self.response_mask)}, {len(self.logprobs)}"
            )
        if any(a > b for a, b in pairwise([*starts, length])) or (starts or [length])[0] != 0:
            raise ValueError(f"segment_starts must rise from 0 to at most the {length} tokens, got {starts}")
        spans = [place for turn in self.turns for place in (turn.start, turn.end)]
        if any(a > b for a, b in pairwise([0, *spans, length])):
            raise ValueError(f"the turns' spans must follow each other within the {length} tokens, got {spans}")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _read_reward(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Files carry `reward` for their readers; it is derived from the turns, so another value is refused."""
        if not isinstance(data, dict) or "reward" not in data:
            return handler(data)
        trajectory = handler({key: value for key, value in data.items() if key != "reward"})
        if data["reward"] != trajectory.reward:
            raise ValueError(
                f"reward is {data['reward']!r}, but the turns earned {trajectory.reward!r}: write the reward of a turn"
            )
        return trajectory

    def to_json(self) -> str:
        """Return the trajectory as one line of JSON that is known to read back.

        Raises ValueError naming the field: what was written past the model's checks (messages, `gt`, a turn's reward)
        may have no JSON form.
        """
        _Messages(messages=self.messages)  # a key that no message has would be dropped below without a word
        try:
            text = self.model_dump_json(warnings="error")
        except ValueError as error:
            name = next((field for field in type(self).model_fields if not self._has_json(field)), "reward")
            raise ValueError(f"trajectory {self.trajectory_id}: {name} has no JSON form: {error}") from error
        type(self).model_validate_json(text)
        return text

    def check_writable(self) -> None:
        """Raise ValueError when `to_json` would, at a fraction of its cost: ids and mask are not read back."""
        _Messages(messages=self.messages)
        numbers = [*(turn.reward for turn in self.turns), *self.rewards.values(), *self.logprobs]
        try:
            self.model_dump_json(warnings="error", exclude={"response_mask"})
            finite = all(isfinite(number) for number in numbers if number is not None)
        except ValueError:
            finite = False
        if not finite:
            self.to_json()  # names the field
            raise ValueError(f"trajectory {self.trajectory_id}: a reward or a log-prob is not a finite number")

    def _has_json(self, field: str) -> bool:
        try:
            self.model_dump_json(include={field}, warnings="error")
        except ValueError:
            return False
        return True

    def start_segment(self) -> None:
        """Begin a segment: what follows is a sequence of its own."""
        self.segment_starts.append(len(self.tokens))

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that template or env added: mask 0, no log-prob."""
        self._append(ids, 0, [None] * len(ids))

    def append_turn(
        self,
        text: str,
        finish_reason: str,
        ids: Sequence[int] = (),
        logprobs: Sequence[float | None] = (),
        *,
        policy_version: int | None = None,
        policy_spans: Sequence[tuple[int, int, int]] = (),
        seconds: float = 0.0,
    ) -> None:
        """Append what the agent produced in one action: its tokens (mask 1, stop token included) and its text.

        `policy_spans` are counted in `ids`.
        """
        start = len(self.tokens)
        self._append(ids, 1, logprobs)
        self.turns.append(
            Turn(
                start=start,
                end=len(self.tokens),
                text=text,
                finish_reason=finish_reason,
                policy_version=policy_version,
                policy_spans=[(version, start + first, start + end) for version, first, end in policy_spans],
                generate_seconds=seconds,
            )
        )

    def _append(self, ids: Sequence[int], mask: Literal[0, 1], logprobs: Sequence[float | None]) -> None:
        """The only way a token enters a trajectory."""
        if len(ids) != len(logprobs):
            raise ValueError(f"trajectory {self.trajectory_id}: {len(ids)} ids came with {len(logprobs)} log-probs")
        if ids and not self.segment_starts:
            raise ValueError(f"trajectory {self.trajectory_id}: tokens were appended before any segment was begun")
        self.tokens.extend(ids)
        self.response_mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reward(self) -> float | None:
        """Sum of the turns' rewards; None when the episode failed or a component broke."""
        return None if self.error is not None or self.broken else float(sum(turn.reward for turn in self.turns))

    @property
    def broken(self) -> list[str]:
        """Names of the components that could not be told."""
        return [name for name, value in self.rewards.items() if value is None]

    @property
    def opening(self) -> int:
        """How many of `messages` are the task's own; what the agent said begins after them."""
        if self.prompt_messages is not None:
            return self.prompt_messages
        roles = [message["role"] for message in self.messages]
        return roles.index("assistant") if "assistant" in roles else len(roles)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Spans `[start, end)` of the segments; each is one sequence for a model. None before the first token."""
        return list(pairwise([*self.segment_starts, len(self.tokens)]))

    @property
    def current_ids(self) -> list[int]:
        """Ids of the last segment: the prompt of the next turn."""
        return self.tokens[self.segment_starts[-1] :]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens with mask 1."""
        return sum(self.response_mask)
