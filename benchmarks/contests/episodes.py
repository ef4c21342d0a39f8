"""Three-turn tool episodes, 32 at once, against a loop that prefills the whole history again at every turn.

Both sides run the same driver, env, template and tool, and sample turns of the same planned lengths; they differ in the
backend alone. The loop's time to render the history again is not charged to it: it gets the ids that ours has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gymtune.agents import GenerateRequest, Generation, ModelAgent, Renderer, Sampling
from gymtune.agents.backend import Backend
from gymtune.agents.rollout import env_factory, plan_episodes, run_episodes
from gymtune.agents.torch_engine import TorchEngine
from gymtune.envs.chat_env import ChatEnv
from gymtune.envs.tasks import Task
from gymtune.rewards.components import Component
from gymtune.rewards.episode import Episode
from gymtune.tools.chat_format import ParsedCall
from gymtune.tools.library.calculator import calculator_tool
from gymtune.tools.messages import system, user
from gymtune.tools.toolbox import Toolbox

from .generation import generate
from .harness import Result, Settings, compete, rate
from .shapes import MINIMIND, folder_of, open_ours, open_peer

SEQUENTIAL, BATCHED = "generate a turn, batch 1", "generate a turn, batch 8"
WANTED = {SEQUENTIAL: 10.0, BATCHED: 3.0}
TURNS = 3
_TURN_TOKENS = (32, 96)
_PROMPT = 238  # tokens, tool schema included
_AT_ONCE, _BATCH, _ONE_BY_ONE = 32, 8, 4  # episodes of each contender: a loop's rate does not depend on how many


class ToolEpisodes(ChatEnv):
    """Three turns whatever is said: each of the first two is answered by a result of the calculator."""

    def __init__(self, prompt_tokens: int, renderer: Renderer, size: int, **options: Any) -> None:
        toolbox = Toolbox([calculator_tool()])
        shortest = len(renderer.prompt([system("0"), user("What is 12 * 34?")], toolbox.schemas()))
        padding = "0" * (prompt_tokens - shortest + 1)  # a digit is a token
        tasks = [Task(str(i), (system(padding), user(f"What is {10 + i} * 34?")), None) for i in range(size)]
        nothing = Component("nothing", "end", lambda episode: 0.0)
        super().__init__(tasks, [nothing], toolbox=toolbox, max_turns=TURNS, **options)

    def user_reply(self, episode: Episode) -> str | None:
        """Answer with what the tool returns; the last turn ends the episode."""
        if episode.turn >= TURNS:
            return None
        result = self.toolbox.call(ParsedCall("0", "calculator", {"expression": f"{episode.turn} * 34"}, None, ""))
        return f'<tool_response>{{"expression": "{episode.turn} * 34", "result": "{result.content}"}}</tool_response>'


class PlannedTurns:
    """A backend whose turns have the lengths of a plan: its last id is the stop token, as if it had been sampled."""

    def __init__(self, backend: Backend, stop_id: int, lengths: tuple[int, int]) -> None:
        self.backend, self.stop_id, self.lengths = backend, stop_id, lengths

    @property
    def max_model_length(self) -> int:
        """As the backend's."""
        return self.backend.max_model_length

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample as many tokens as the plan says: a function of task and turn, so the same on both sides."""
        low, high = self.lengths
        sampling = request.sampling.model_copy(update={"max_new_tokens": low + request.seed % (high - low + 1)})
        found = await self.backend.generate(replace(request, sampling=sampling, stop_ids=()))
        return replace(found, ids=[*found.ids[:-1], self.stop_id], finish_reason="stop")

    def release(self, session: str) -> None:
        """Free what the episode held."""
        self.backend.release(session)

    def load_weights(self, version: int, weights: Any) -> None:
        """Hand on."""
        self.backend.load_weights(version, weights)


class GenerateLoop:
    """`transformers.generate` as a backend: it waits for `batch` requests and keeps nothing between turns.

    Log-probs, which ours gives, are not asked of it: they stand as 0.
    """

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.batch = model, batch
        self.max_model_length = int(model.config.max_position_embeddings)
        self._requests: list[GenerateRequest] = []
        self._rows: asyncio.Future[list[list[int]]]

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample with whoever else is of the same batch."""
        if not self._requests:
            self._rows = asyncio.get_running_loop().create_future()
        requests, rows = self._requests, self._rows
        requests.append(request)
        place = len(requests) - 1
        if len(requests) == self.batch:
            self._requests = []
            try:
                rows.set_result(self._sample(requests))
            except RuntimeError as error:
                rows.set_exception(error)
        ids = (await rows)[place]
        return Generation(ids, [0.0] * len(ids), "length", 0)

    def _sample(self, requests: Sequence[GenerateRequest]) -> list[list[int]]:
        lengths = [request.sampling.max_new_tokens for request in requests]
        rows = generate(self.model, [request.prompt_ids for request in requests], max(lengths))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def release(self, session: str) -> None:
        """Nothing is held."""

    def load_weights(self, version: int, weights: Any) -> None:
        """The weights stay."""


def run(settings: Settings) -> list[Result]:
    """Measure."""
    folder = folder_of(MINIMIND, settings)
    (model, renderer), peer = open_ours(folder), open_peer(folder)
    lengths = (settings.pick(_TURN_TOKENS[0], 4), settings.pick(_TURN_TOKENS[1], 8))

    def play(backend: Backend, episodes: int, at_once: int) -> int:
        agent = ModelAgent(
            PlannedTurns(backend, renderer.stop_ids[0], lengths), renderer, Sampling(max_new_tokens=lengths[1])
        )
        make = env_factory(lambda: ToolEpisodes(_PROMPT, renderer, _AT_ONCE), agent)
        specs = plan_episodes(range(episodes), 1, run_id="bench", seed=0)
        trajectories = run_episodes(make, agent, specs, concurrency=at_once)
        for trajectory in trajectories:
            if trajectory.error is not None or len(trajectory.turns) != TURNS:
                raise RuntimeError(f"an episode went wrong: {trajectory.error or trajectory.stop_reason}")
        return sum(trajectory.sampled_tokens for trajectory in trajectories)

    engine = TorchEngine(model, max_sequences=_AT_ONCE)
    one, eight = GenerateLoop(peer, 1), GenerateLoop(peer, _BATCH)
    few = settings.pick(_ONE_BY_ONE, 1)
    return compete(
        "tool episodes, 3 turns, 32 at once", "tokens/s",
        {
            "gymtune": rate(lambda: play(engine, _AT_ONCE, _AT_ONCE)),
            SEQUENTIAL: rate(lambda: play(one, few, 1)),
            BATCHED: rate(lambda: play(eight, _BATCH, _BATCH)),
        },
        settings,
        wanted=WANTED,
        detail={"model": MINIMIND.name, "prompt_tokens": _PROMPT, "turn_tokens": lengths},
    )  # fmt: skip
