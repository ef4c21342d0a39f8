"""Rewards from a server: one POST scores a batch. What it says is checked; when it is silent, nobody has a score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from ..tools.errors import ConfigError

_NOT_SENT = ("trajectories",)  # no JSON, and all of it is in the other columns
_SHOWN = 200  # characters of an answer that an error repeats
_LOST = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Worth another try. A server that is slow to answer is not: it may be at work still."""


def is_url(name: str) -> bool:
    """Whether the name of a reward model is the address of a server."""
    return name.startswith(("http://", "https://"))


class HttpReward:
    """A TRL-style function behind HTTP: one score an episode, or null where the server has nothing to say.

    It gets `{"prompts": [...], "completions": [...], "messages": [...], "gt": [...], ...}`, lists with an item an
    episode: the task's messages, what followed, both together, and every column that a function of TRL's form may ask
    for. It answers `{"scores": [...]}`.

    Args:
        url: where to post.
        timeout: seconds for an answer.
        retries: how often to try again after a lost connection or a status of 500 and above.
        backoff: seconds before the first of them; each one waits twice as long as the one before.

    Raises ConfigError for what is no address, or one with a password (it would be written into the run folder).
    """

    def __init__(self, url: str, *, timeout: float = 60.0, retries: int = 4, backoff: float = 0.5) -> None:
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"reward model {url!r} is no address: {error}") from error
        if not address.host or address.userinfo:
            wanted = "names no host" if not address.host else "holds a password, which the run folder would keep"
            raise ConfigError(f"reward model {address.copy_with(userinfo=b'')}: the address {wanted}")
        self.__name__ = self.url = url
        self.timeout, self.retries, self.backoff = timeout, retries, backoff

    def __call__(
        self, prompts: Sequence[Sequence[Any]], completions: Sequence[Sequence[Any]], **columns: Any
    ) -> Sequence[float | None]:
        """Return the scores of a batch.

        Raises ConnectionError when the server cannot be reached or answers with an error, ValueError for an answer of
        another form; the scorer makes "no score for this batch" of both, and tells why.
        """
        messages = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        sent = {key: column for key, column in columns.items() if key not in _NOT_SENT}
        sent |= {"prompts": prompts, "completions": completions, "messages": messages}
        try:
            response = self._post(sent)
        except httpx.HTTPError as error:
            raise ConnectionError(f"no answer: {type(error).__name__}: {error}") from error
        if not response.is_success:
            raise ConnectionError(f"status {response.status_code}: {response.text[:_SHOWN]}")
        try:
            answer = response.json()
        except ValueError as error:
            raise ValueError(f"the answer is no JSON: {response.text[:_SHOWN]!r}") from error
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise ValueError(f'wanted {{"scores": [...]}}, came {response.text[:_SHOWN]!r}')
        return scores

    def _post(self, sent: dict[str, Any]) -> httpx.Response:
        """Send, and again after a lost connection or a fault of the server; return or raise what came at last."""
        with httpx.Client(timeout=self.timeout, trust_env=False) as client:
            for pause in [self.backoff * 2**n for n in range(self.retries)]:
                try:
                    response = client.post(self.url, json=sent)
                    if not response.is_server_error:
                        return response
                except _LOST:
                    pass
                time.sleep(pause)
            return client.post(self.url, json=sent)
