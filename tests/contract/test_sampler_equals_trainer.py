"""What the sampler recorded and what the trainer computes from the same tokens are the same numbers."""

from pathlib import Path

import pytest
import torch

from gymtune.agents import ModelAgent, Renderer, Sampling, plan_episodes, run_episodes
from gymtune.agents.models import load_model
from gymtune.agents.torch_engine import TorchEngine
from gymtune.envs.calculator import CalculatorEnv
from gymtune.tools.chat_format import ParsedCall
from gymtune.tools.formats.hermes import HermesFormat
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.policy import policy_logprobs

TOLERANCE = 1e-4  # fp32; the two sum in different orders
TRAJECTORIES = 200


class TalkativeFormat(HermesFormat):
    """Takes every text for a call, so that even a policy that knows nothing plays several turns."""

    name = "talkative"

    def scan(self, text: str, turn: int) -> tuple[str, tuple[ParsedCall, ...]]:
        return "", (ParsedCall(f"call_{turn}_0", "calculator", {"expression": "1 + 1"}, None, text),)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_of_sampler_and_trainer_are_equal(tiny_model: Path, temperature: float):
    model = load_model(tiny_model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a random model is all but indifferent to what it reads; this one is not
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3, generator=generator)
    renderer = Renderer.from_folder(tiny_model, chat_format=TalkativeFormat())
    renderer.stop_ids = (*renderer.stop_ids, *range(60))  # such a policy ends a turn by chance alone
    engine = TorchEngine(model, max_sequences=24)  # fewer slots than episodes: sequences wait, leave and come back
    agent = ModelAgent(engine, renderer, Sampling(temperature=temperature, max_new_tokens=10))
    trajectories = run_episodes(
        lambda: CalculatorEnv(chat_format=renderer.chat_format, max_turns=3),
        agent,
        plan_episodes(range(TRAJECTORIES // 4), 4, run_id="run", seed=2),
        concurrency=40,
    )
    assert [t.error for t in trajectories] == [None] * TRAJECTORIES
    assert sum(len(t.turns) > 1 for t in trajectories) > TRAJECTORIES / 4
    rows = make_rows(experiences_of(trajectories, [1.0] * TRAJECTORIES, need_logprobs=True))
    largest, tokens, spread = 0.0, 0, set()
    for batch in micro_batches(rows, 4096, torch.device("cpu")):
        with torch.no_grad():
            logprobs, _ = policy_logprobs(model, batch)
        largest = max(largest, float((logprobs - batch.old_logprobs).abs().max()))
        tokens += len(logprobs)
        spread |= set(logprobs.round(decimals=1).tolist())
    print(
        f"temperature {temperature}: largest difference {largest:.2e} over {tokens} tokens of {len(rows)} trajectories"
    )
    assert tokens == sum(t.sampled_tokens for t in trajectories)
    assert len(spread) > 20
    assert largest <= TOLERANCE
