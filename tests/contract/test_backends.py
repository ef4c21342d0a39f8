"""What every backend keeps: the torch engine, a real server, and a double that replays what the real one answered.

The same requests go to each. `tests/sglang/record.py` records anew after a change to a request here.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import pytest
import torch
from sglang_fixtures import Replay

from gymtune.agents import Backend, GenerateRequest, Generation, Sampling
from gymtune.agents.models import CausalAttend, load_model
from gymtune.agents.sglang import Servers, SGLangEngine
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.errors import ConfigError

RECORDED = Path(__file__).parents[1] / "sglang" / "recorded" / "contract.json"
LONGEST = 512  # of a sequence
LOGPROB_TOLERANCE = 1e-4  # fp32: other kernels, other orders of summation
GREEDY = Sampling(temperature=0, max_new_tokens=12)
PROMPT = (7, 11, 13, 17)


@dataclass(frozen=True)
class Subject:
    """A backend, and the model it samples from once more, as a reference."""

    engine: Backend
    reference: TorchEngine
    vocab_size: int

    def generate(self, *requests: GenerateRequest) -> list[Generation]:
        """Return what is sampled for requests that wait together."""

        async def all_of_them() -> list[Generation]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        return asyncio.run(all_of_them())

    def scores(self, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probs of ids behind a prompt."""
        return asyncio.run(self.reference.score([*prompt, *ids], temperature))[len(prompt) - 1 :]


@pytest.fixture(params=["torch", "double", pytest.param("server", marks=pytest.mark.sglang)])
def backend(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "server":
        found = request.getfixturevalue("sglang_server")
        url, folder = found.url, found.model
    else:
        folder = request.getfixturevalue("sglang_model")
    if not folder.exists():  # a proxy that records says where the model is in the recordings
        folder = request.getfixturevalue("sglang_model")
    model = load_model(folder)
    if request.param == "double":
        url = request.getfixturevalue("double")(Replay(RECORDED)).url
    vocab_size = model.config.vocab_size
    engine: Backend
    if request.param == "torch":
        engine = TorchEngine(model, max_model_length=LONGEST)
    else:
        engine = SGLangEngine(Servers([url], patience_seconds=5), vocab_size=vocab_size, max_model_length=LONGEST)
    yield Subject(engine, TorchEngine(model), vocab_size)
    engine.close()


def ask(sampling: Sampling = GREEDY, prompt: Sequence[int] = PROMPT, stop_ids=(), decode=None) -> GenerateRequest:
    return GenerateRequest(list(prompt), sampling, tuple(stop_ids), seed=1, session="s", decode=decode)


def letters(ids: Sequence[int]) -> str:
    """A text of one character an id."""
    return "".join(chr(0x4E00 + token) for token in ids)


def test_greedy_takes_the_likeliest_and_tells_log_probs_at_temperature_1(backend: Subject):
    (found,) = backend.generate(ask())
    with torch.no_grad():
        model = backend.reference.model
        expected: list[int] = []
        for _ in range(12):
            ids = torch.tensor([[*PROMPT, *expected]])
            hidden = model(ids, torch.arange(ids.shape[1])[None], CausalAttend())
            expected.append(int(model.logits(hidden[:, -1]).argmax()))
    assert found.ids == expected
    assert found.logprobs == pytest.approx(backend.scores(PROMPT, found.ids, 1.0), abs=LOGPROB_TOLERANCE)
    assert (found.finish_reason, found.policy_version, found.spans) == ("length", 0, ())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_full_softmax_at_the_temperature(backend: Subject, temperature: float):
    sampling = Sampling(temperature=temperature, max_new_tokens=24)
    found = backend.generate(*(ask(sampling, [3, 5, 8 + k]) for k in range(4)))
    for k, one in enumerate(found):
        assert len(one.ids) == len(one.logprobs) <= 24
        assert all(0 <= token < backend.vocab_size for token in one.ids)
        assert all(isfinite(logprob) and logprob <= 0 for logprob in one.logprobs)
        expected = backend.scores([3, 5, 8 + k], one.ids, temperature)
        assert one.logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_cuts_of_the_distribution_do_not_touch_the_log_probs(backend: Subject):
    (greedy,) = backend.generate(ask())
    narrow = Sampling(temperature=0.7, top_k=1, max_new_tokens=12)
    (found,) = backend.generate(ask(narrow))
    assert found.ids == greedy.ids
    assert found.logprobs == pytest.approx(backend.scores(PROMPT, found.ids, 0.7), abs=LOGPROB_TOLERANCE)
    for sampling in (Sampling(top_p=1e-6, max_new_tokens=12), Sampling(min_p=1.0, max_new_tokens=12)):
        assert backend.generate(ask(sampling))[0].ids == greedy.ids


def test_a_stop_token_ends_the_turn_and_is_in_it(backend: Subject):
    (whole,) = backend.generate(ask())
    stop = whole.ids[4]
    first = whole.ids.index(stop)
    (found,) = backend.generate(ask(stop_ids=[stop]))
    assert (found.ids, found.finish_reason) == (whole.ids[: first + 1], "stop")
    assert len(found.logprobs) == first + 1


def test_a_stop_token_at_the_last_place_is_a_stop(backend: Subject):
    (whole,) = backend.generate(ask())
    end = whole.ids.index(whole.ids[4]) + 1
    (found,) = backend.generate(ask(Sampling(temperature=0, max_new_tokens=end), stop_ids=[whole.ids[4]]))
    assert (found.ids, found.finish_reason) == (whole.ids[:end], "stop")


def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(backend: Subject):
    (whole,) = backend.generate(ask())
    text = letters(whole.ids)
    stop = text[5:7]
    end = text.index(stop) + 2
    sampling = Sampling(temperature=0, max_new_tokens=12, stop=("nowhere", stop))
    (found,) = backend.generate(ask(sampling, decode=letters))
    assert (found.ids, found.finish_reason) == (whole.ids[:end], "stop")
    assert found.logprobs == pytest.approx(whole.logprobs[:end], abs=LOGPROB_TOLERANCE)


def test_stop_strings_without_a_text_are_refused(backend: Subject):
    with pytest.raises(ConfigError, match=r"stop strings .* need the request's `decode`"):
        backend.generate(ask(Sampling(stop=("x",))))


def test_one_token(backend: Subject):
    (found,) = backend.generate(ask(Sampling(temperature=0, max_new_tokens=1)))
    assert (len(found.ids), len(found.logprobs), found.finish_reason) == (1, 1, "length")


def test_a_turn_ends_where_the_context_does(backend: Subject):
    assert backend.engine.max_model_length == LONGEST
    (found,) = backend.generate(ask(prompt=[k % 300 for k in range(LONGEST - 3)]))
    assert (len(found.ids), found.finish_reason) == (3, "length")


@pytest.mark.parametrize("length", [0, LONGEST, LONGEST + 100])
def test_a_prompt_that_cannot_fit_is_refused(backend: Subject, length: int):
    with pytest.raises(ConfigError, match=rf"a prompt must have 1 to {LONGEST - 1} tokens .* got {length}"):
        backend.generate(ask(prompt=[7] * length))


@pytest.mark.parametrize("beyond", [-1, 0, 5])
def test_ids_outside_the_vocabulary_are_refused(backend: Subject, beyond: int):
    token = beyond if beyond < 0 else backend.vocab_size + beyond
    with pytest.raises(ConfigError, match=rf"token id {token} is outside the vocabulary of {backend.vocab_size}"):
        backend.generate(ask(prompt=[7, token, 7]))
    assert len(backend.generate(ask())[0].ids) == 12  # whoever samples is still there


def test_requests_that_wait_together_get_their_own_answers(backend: Subject):
    prompts = [[20 + k, 3 * k, 5] for k in range(16)]
    together = backend.generate(*(ask(prompt=prompt) for prompt in prompts))
    for prompt, found in zip(prompts, together, strict=True):
        assert found.logprobs == pytest.approx(backend.scores(prompt, found.ids, 1.0), abs=LOGPROB_TOLERANCE)
    assert len({tuple(found.ids) for found in together}) > 8


def test_cancelling_frees_what_was_held(backend: Subject):
    long = ask(Sampling(temperature=1.0, max_new_tokens=500))

    async def cancelled() -> Generation:
        task = asyncio.create_task(backend.engine.generate(long))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await backend.engine.generate(ask())

    assert len(asyncio.run(cancelled()).ids) == 12


def test_several_event_loops_one_after_the_other(backend: Subject):
    first, second = backend.generate(ask()), backend.generate(ask())
    assert first[0].ids == second[0].ids
    backend.engine.release("s")
    backend.engine.release("never heard of")
