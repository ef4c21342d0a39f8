"""The client against a real server: numbers equal to those of our own model, aborts, storms, errors as they come."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from sglang_fixtures import RealServer

from gymtune.agents import GenerateRequest, Generation, Sampling
from gymtune.agents.models import load_model
from gymtune.agents.sglang import Refused, Servers, SGLangEngine
from gymtune.agents.sglang.wire import read_scores, scoring_body
from gymtune.agents.torch_engine import TorchEngine

pytestmark = pytest.mark.sglang

LOGPROB_TOLERANCE = 1e-4  # fp32; the largest difference seen was 2e-6
MANY = 64
RECORDED = Path(__file__).parent / "recorded" / "contract.json"
CHECK = Path(__file__).parent / "check_types.py"


@pytest.fixture
def engine(sglang_server: RealServer, reference: TorchEngine) -> Iterator[SGLangEngine]:
    made = SGLangEngine(Servers([sglang_server.url]), vocab_size=reference.model.config.vocab_size)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(sglang_server: RealServer) -> TorchEngine:
    return TorchEngine(load_model(sglang_server.model))


def ask(prompt: Sequence[int], stop_ids: Sequence[int] = (), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(list(prompt), Sampling(**sampling), tuple(stop_ids), seed=1, session=str(prompt))


def generate(engine: Any, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(all_of_them())


def running(engine: SGLangEngine) -> int:
    """Return how many requests the server has, running or waiting."""
    loads = engine.servers.get(engine.servers.urls[0], "/v1/loads?include=core")["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def until_idle(engine: SGLangEngine, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while running(engine):
        assert time.monotonic() < end, f"{running(engine)} requests are still running"
        time.sleep(0.1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_log_probs_are_the_models(engine: SGLangEngine, reference: TorchEngine, temperature: float):
    prompts = [[k, 2 * k, 5, 3 * k + 1] for k in range(1, MANY + 1)]
    found = generate(engine, [ask(prompt, temperature=temperature, max_new_tokens=32) for prompt in prompts])
    largest, lowest, tokens = 0.0, inf, 0
    for prompt, one in zip(prompts, found, strict=True):
        scores = asyncio.run(reference.score([*prompt, *one.ids], temperature))[len(prompt) - 1 :]
        largest = max(largest, *(abs(a - b) for a, b in zip(scores, one.logprobs, strict=True)))
        lowest, tokens = min(lowest, *one.logprobs), tokens + len(one.ids)
    print(f"temperature {temperature}: largest difference {largest:.1e} over {tokens} tokens")
    assert largest <= LOGPROB_TOLERANCE
    assert lowest < -3  # not all the likeliest ones
    assert tokens > 16 * MANY


def test_greedy_ids_are_the_torch_engines(engine: SGLangEngine, reference: TorchEngine):
    requests = [ask([k, 7, k + 1], temperature=0, max_new_tokens=24) for k in range(1, 17)]
    theirs, ours = generate(engine, requests), generate(reference, requests)
    ended = reference.model.config.eos_token_ids
    for one, other in zip(theirs, ours, strict=True):
        cut = next((n + 1 for n, token in enumerate(other.ids) if token in ended), len(other.ids))
        assert one.ids == other.ids[:cut]
        assert one.logprobs == pytest.approx(other.logprobs[:cut], abs=LOGPROB_TOLERANCE)


def test_the_models_own_end_token_ends_a_turn(engine: SGLangEngine, reference: TorchEngine):
    requests = [ask([k, 3], temperature=3.0, max_new_tokens=100) for k in range(1, MANY + 1)]
    found = generate(engine, requests)
    ended = [one for one in found if one.finish_reason == "stop"]
    assert ended
    for one in found:
        ends = [n for n, token in enumerate(one.ids) if token in reference.model.config.eos_token_ids]
        assert ends == ([len(one.ids) - 1] if one.finish_reason == "stop" else [])
        assert one.finish_reason == "stop" or len(one.ids) == 100


def test_the_longest_prompt_and_the_longest_turn(engine: SGLangEngine):
    longest = engine.max_model_length
    for length in (longest - 1, longest - 7):
        (found,) = generate(engine, [ask([k % 300 + 1 for k in range(length)], temperature=0, max_new_tokens=99)])
        assert (len(found.ids), found.finish_reason) == (longest - length, "length")
    (found,) = generate(engine, [ask([5, 6], temperature=1.0, max_new_tokens=10_000)])
    assert len(found.ids) == longest - 2 or found.finish_reason == "stop"


def test_scores_are_the_models(engine: SGLangEngine, reference: TorchEngine):
    ids, url = [3, 1, 4, 1, 5, 9, 2, 6], engine.servers.urls[0]
    scores = read_scores(url, ids, engine.servers.post(url, "/generate", scoring_body(ids)))
    assert scores == pytest.approx(asyncio.run(reference.score(ids)), abs=LOGPROB_TOLERANCE)


def test_a_storm_of_cancels_leaves_nothing_running(engine: SGLangEngine):
    async def storm() -> list[Any]:
        requests = [ask([k, 5], temperature=1.0, max_new_tokens=1000) for k in range(1, 2 * MANY + 1)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]  # half of them wait there
        await asyncio.sleep(1.0)
        assert await asyncio.to_thread(running, engine) > MANY / 2
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(one) for one in asyncio.run(storm())} <= {asyncio.CancelledError, Generation}
    until_idle(engine)
    assert len(generate(engine, [ask([1, 2], temperature=0, max_new_tokens=5)])[0].ids) == 5


def test_cancels_at_every_moment_leave_nothing_running(engine: SGLangEngine):
    async def one(delay: float) -> None:
        task = asyncio.create_task(engine.generate(ask([7, 5], temperature=1.0, max_new_tokens=1000)))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(delay) for delay in [0, 0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]))

    asyncio.run(all_of_them())
    until_idle(engine)


def test_what_others_abort_is_sampled_again(engine: SGLangEngine, reference: TorchEngine):
    url = engine.servers.urls[0]

    async def aborted() -> list[Generation]:
        requests = [ask([k, 5], temperature=1.0, max_new_tokens=200) for k in range(1, 9)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.4)
        await asyncio.to_thread(engine.servers.post, url, "/abort_request", {"rid": "", "abort_all": True})
        return await asyncio.gather(*tasks)

    for one in asyncio.run(aborted()):
        assert len(one.ids) == len(one.logprobs)
        assert len(one.ids) == 200 or one.ids[-1] in reference.model.config.eos_token_ids


def test_a_paused_server_keeps_its_requests(engine: SGLangEngine):
    url = engine.servers.urls[0]

    async def paused() -> Generation:
        engine.servers.post(url, "/pause_generation", {"mode": "in_place"})
        try:
            task = asyncio.create_task(engine.generate(ask([3, 5], temperature=0, max_new_tokens=8)))
            await asyncio.sleep(0.3)
            assert not task.done()
        finally:
            engine.servers.post(url, "/continue_generation")
        return await task

    assert len(asyncio.run(paused()).ids) == 8


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", {}, 400, "(input_ids|text)"),
        ("/generate", {"input_ids": []}, 400, "input_ids cannot be empty"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}, 400, "temperature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temprature": 1}}, 400, "unknown field `temprature`"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": "3"}}, 400, "string .3., expected"),
        ("/generate", {"input_ids": [1] * 1200}, 400, "longer than the model's context length"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}, 400, "maximum context length"),
        ("/generate", {"input_ids": [1], "lora_path": "nobody"}, 400, "(?i)lora"),
        ("/generate", {"input_ids": ["x"]}, 400, "must be int"),
        ("/generate", {"text": "hello"}, 400, "(?i)tokenizer|text"),
        ("/nowhere", {}, 404, "Not Found"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, "nowhere"),
    ],
)
def test_errors_as_the_server_writes_them(engine: SGLangEngine, path: str, body: Any, status: int, words: str):
    with pytest.raises(Refused, match=words) as caught:
        engine.servers.post(engine.servers.urls[0], path, body)
    assert (caught.value.path, caught.value.status) == (path, status)


def test_what_the_server_says_of_itself(engine: SGLangEngine, sglang_server: RealServer):
    facts = engine.servers.facts(sglang_server.url)
    assert (facts.model_path, facts.model_type) == (str(sglang_server.model), "qwen3")
    assert (facts.has_tokenizer, facts.enable_lora, facts.tp_size, facts.dp_size) == (False, False, 1, 1)
    assert facts.max_length == engine.max_model_length == 1018


def test_the_doubles_traffic_is_what_sglangs_own_types_allow(sglang_python: Path):
    traffic = json.loads(RECORDED.read_text(encoding="utf-8"))["traffic"]
    checked = subprocess.run(
        [str(sglang_python), str(CHECK)], input=json.dumps(traffic), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
    assert int(checked.stdout) == sum(
        1 + (row["path"] == "/generate") for row in traffic if row["path"] != "/server_info"
    )
