"""Trajectory: the one currency. What an agent did in one episode, token by token, and what it earned.

Tokens enter through two doors only: `append_context` (template and env: mask 0) and `append_turn` (the agent: mask 1). The mask is born with the token and never derived from token values. History is never rewritten; where a chat
template cannot continue a history, a new segment begins (its own ids and mask, the same episode).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from ..tools.messages import Message

SCHEMA_VERSION = 1


class ToolUse(BaseModel):
    """One tool call as it ended: which tool, which outcome, how long (seconds)."""

    model_config = ConfigDict(extra="forbid")
    name: str
    outcome: str
    seconds: float = 0.0


class Turn(BaseModel):
    """One action of the agent: tokens `[start, end)` of the trajectory, why it ended and what the env made of it.

    `reward` is what this turn earned (a later env answer may add to the last turn); `seconds` is the wall time of
    sampling (`generate`) and of the env's step.
    """

    model_config = ConfigDict(extra="forbid")
    start: int
    end: int
    text: str
    finish_reason: str
    policy_version: int | None = None
    reward: float = 0.0
    tools: list[ToolUse] = Field(default_factory=list)
    generate_seconds: float = 0.0
    step_seconds: float = 0.0


class Sampling(BaseModel):
    """How the tokens were drawn. Log-probs are those of the full softmax at `temperature` (1 when it is 0: greedy)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 is off")
    max_new_tokens: int = Field(256, ge=1, description="sampled tokens a turn")


class Trajectory(BaseModel):
    """One episode. `tokens`, `response_mask` and `logprobs` have equal lengths, checked at every append.

    `logprobs` is None where the mask is 0, and where an agent wrote the token without sampling it (an expert): SFT
    takes such tokens, RL refuses them. `reward` is the sum over turns, None when the episode failed for reasons
    that are not the agent's (`error`) or when nothing could be scored (`broken`).
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
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
    response_mask: list[int] = Field(default_factory=list)
    logprobs: list[float | None] = Field(default_factory=list)
    segment_starts: list[int] = Field(default_factory=list)

    messages: list[Message] = Field(default_factory=list)
    tools: str = "[]"
    turns: list[Turn] = Field(default_factory=list)
    rewards: dict[str, float | None] = Field(default_factory=dict)
    success: bool | None = None
    terminated: bool = False
    truncated: bool = False
    stop_reason: str | None = None
    error: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_derived(cls, data: Any) -> Any:
        """Files carry `reward` for their readers; here it is derived from the turns."""
        return {k: v for k, v in data.items() if k != "reward"} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_lengths()
        if any(not 0 <= turn.start <= turn.end <= len(self.tokens) for turn in self.turns):
            raise ValueError(f"trajectory {self.trajectory_id}: a turn's span leaves the {len(self.tokens)} tokens")
        return self

    def _check_lengths(self) -> None:
        if not len(self.tokens) == len(self.response_mask) == len(self.logprobs):
            raise ValueError(
                f"trajectory {self.trajectory_id}: tokens, response_mask and logprobs must be equally long, got "
                f"{len(self.tokens)}, {len(self.response_mask)}, {len(self.logprobs)}"
            )

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
        seconds: float = 0.0,
    ) -> None:
        """Append what the agent produced in one action: its tokens (mask 1, stop token included) and its text."""
        start = len(self.tokens)
        self._append(ids, 1, logprobs)
        self.turns.append(
            Turn(
                start=start,
                end=len(self.tokens),
                text=text,
                finish_reason=finish_reason,
                policy_version=policy_version,
                generate_seconds=seconds,
            )
        )

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float | None]) -> None:
        """The only way a token enters a trajectory."""
        self.tokens.extend(ids)
        self.response_mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)
        self._check_lengths()

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
    def segments(self) -> list[tuple[int, int]]:
        """Spans `[start, end)` of the segments; each is one sequence for a model."""
        ends = [*self.segment_starts[1:], len(self.tokens)]
        return list(zip(self.segment_starts, ends, strict=True))

    @property
    def current_ids(self) -> list[int]:
        """Ids of the last segment: the prompt of the next turn."""
        return self.tokens[self.segment_starts[-1] :]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens with mask 1."""
        return sum(self.response_mask)
