"""Weights to a real server: every way, under load, and when something goes wrong."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang_fixtures import start_server

from gymtune.agents import Sampling
from gymtune.agents.backend import GenerateRequest, Generation
from gymtune.agents.models import adapter_off, apply_lora, load_adapter, load_model, merged_state, save_adapter
from gymtune.agents.models.decoder import Decoder
from gymtune.agents.sglang import Drifted, Refused, Servers, SGLangEngine, Unreachable, WrongVersion
from gymtune.agents.sglang.disk import DiskWay
from gymtune.agents.sglang.distributed import DistributedWay
from gymtune.agents.sglang.parity import Parity, score_with
from gymtune.agents.sglang.ways import Way
from gymtune.agents.sglang.weights import WeightSync, make_way

pytestmark = pytest.mark.sglang

TOLERANCE = 1e-4  # of a log-prob in float32
STEP = 0.02  # size of the noise that stands for an optimizer step: it moves log-probs by far more than the tolerance
WAYS = ["disk", "tensor", "distributed"]

Tie = Callable[..., WeightSync]


@pytest.fixture
def model(server: Any) -> Decoder:
    return load_model(server.model)


@pytest.fixture
def servers(server: Any) -> Iterator[Servers]:
    client = Servers([server.url], patience_seconds=5.0)
    yield client
    client.close()


@pytest.fixture
def tie(server: Any, model: Decoder, tmp_path: Path) -> Iterator[Tie]:
    """Makes what brings weights to the servers, by a way's name or a way."""
    made: list[WeightSync] = []

    def sync_of(servers: Servers, way: str | Way) -> WeightSync:
        if isinstance(way, str):
            way = make_way(way, servers, folder=tmp_path / "weights", start=server.model)
        parity = Parity(score_with(model), model.config.vocab_size, TOLERANCE)
        made.append(WeightSync(servers, way, parity, server.model))
        return made[-1]

    yield sync_of
    for sync in made:
        sync.close()


def step(model: torch.nn.Module, seed: int) -> None:
    """Move the weights that are trained, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(STEP * torch.randn(parameter.shape, generator=generator))


def request(temperature: float = 1.0, tokens: int = 24, session: str = "a") -> GenerateRequest:
    sampling = Sampling(temperature=temperature, max_new_tokens=tokens)
    return GenerateRequest(prompt_ids=[5, 9, 60, 7, 100], sampling=sampling, stop_ids=(), seed=0, session=session)


def difference(
    model: Decoder, asked: GenerateRequest, got: Generation, start: int = 0, end: int | None = None
) -> float:
    """Return how far the sampled log-probs of a span are from those of the model."""
    prompt = list(asked.prompt_ids)
    scores = score_with(model, asked.sampling.temperature)([*prompt, *got.ids])[len(prompt) - 1 :]
    pairs = list(zip(got.logprobs, scores, strict=True))[start:end]
    return max(abs(sampled - scored) for sampled, scored in pairs)


@pytest.mark.parametrize("name", WAYS)
def test_sampled_logprobs_are_those_of_the_weights_that_were_pushed(
    name: str, servers: Servers, model: Decoder, tie: Tie
) -> None:
    sync = tie(servers, name)
    engine = SGLangEngine(servers, vocab_size=model.config.vocab_size, sync=sync)
    for version in (1, 2, 3):
        before = load_model_like(model)
        step(model, version)
        engine.load_weights(version, merged_state(model))
        assert sync.metrics["sync/logprob_gap"] <= TOLERANCE
        for temperature in (1.0, 0.7):
            asked = request(temperature)
            got = asyncio.run(engine.generate(asked))
            assert got.policy_version == version
            assert difference(model, asked, got) <= TOLERANCE
            assert difference(before, asked, got) > 10 * TOLERANCE  # these are not the weights of before


def load_model_like(model: Decoder) -> Decoder:
    """Return a copy of the model as it is now."""
    copy = Decoder(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


@pytest.mark.parametrize("name", WAYS)
def test_a_swap_in_mid_generation_leaves_spans_that_each_have_their_weights_logprobs(
    name: str, server: Any, servers: Servers, model: Decoder, tie: Tie
) -> None:
    sync = tie(servers, name)
    engine = SGLangEngine(servers, vocab_size=model.config.vocab_size, sync=sync)
    of: dict[int, Decoder] = {}

    def push(version: int) -> None:
        if version > 1:
            step(model, version)
        of[version] = load_model_like(model)
        engine.load_weights(version, merged_state(model))

    push(1)
    asked = [request(tokens=400, session=str(number)) for number in range(16)]  # some end early

    async def swap() -> list[Generation]:
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        for version in (2, 3):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(push, version)
        return await asyncio.gather(*running)

    several = 0
    for one, got in zip(asked, asyncio.run(swap()), strict=True):
        spans = got.spans or ((got.policy_version, 0, len(got.ids)),)
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == len(got.ids) == len(got.logprobs)
        several += len(spans) > 1
        for version, start, end in spans:
            assert difference(of[version], one, got, start, end) <= TOLERANCE
    assert several >= 1


def test_the_default_group_of_a_trainer_is_its_own(servers: Servers, model: Decoder, tie: Tie) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sync = tie(servers, "distributed")
        for version in (1, 2):
            step(model, version)
            sync.push(version, merged_state(model))
        sync.close()
        total = torch.ones(3)
        dist.all_reduce(total)
        assert (dist.get_world_size(), total.tolist()) == (1, [1.0, 1.0, 1.0])
    finally:
        dist.destroy_process_group()


def test_a_server_that_did_not_take_the_weights_is_told_by_its_version(
    server: Any, servers: Servers, model: Decoder, tie: Tie
) -> None:
    class Lazy(Way):
        def send(self, *_: object) -> None:
            """Send nothing."""

    with pytest.raises(WrongVersion, match="version 4 was pushed, it says that it has 'default'"):
        tie(servers, Lazy(servers)).push(4, merged_state(model))
    assert runs(server, model)


def test_weights_that_arrive_garbled_are_found(server: Any, servers: Servers, model: Decoder, tie: Tie) -> None:
    sync = tie(servers, "tensor")
    weights = merged_state(model)
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(Drifted, match="after version 7 was pushed, log-probs of a fixed prompt differ by"):
        sync.push(7, weights | {name: weights[name].flip(0)})
    sync.push(8, weights)
    assert sync.metrics["sync/logprob_gap"] <= TOLERANCE


def test_a_folder_that_the_server_does_not_see_leaves_it_with_the_old_weights(
    server: Any, servers: Servers, model: Decoder, tie: Tie, tmp_path: Path
) -> None:
    class Elsewhere(DiskWay):
        def send(self, *given: Any) -> None:
            shutil.rmtree(self.folders.kept[-1])
            super().send(*given)

    old = load_model_like(model)
    step(model, 1)
    with pytest.raises(Refused, match=r"the old weights go on serving\. Does the server see"):
        tie(servers, Elsewhere(servers, tmp_path / "there", server.model)).push(1, merged_state(model))
    assert runs(server, old)


def runs(server: Any, model: Decoder) -> bool:
    """Tell whether a server samples, with the weights of a model: it was not left paused."""
    servers = Servers([server.url], patience_seconds=5.0)
    try:
        engine = SGLangEngine(servers, vocab_size=model.config.vocab_size)
        got = asyncio.run(asyncio.wait_for(engine.generate(request()), 30.0))
        return difference(model, request(), got) <= TOLERANCE
    finally:
        servers.close()


def test_one_of_two_servers_is_dead(server: Any, free_port: int, model: Decoder, tie: Tie) -> None:
    servers = Servers([server.url, f"http://127.0.0.1:{free_port}"], patience_seconds=5.0)
    try:
        sync = tie(servers, "disk")
        step(model, 1)
        sync.push(1, merged_state(model))
        assert sync.metrics["sync/servers"] == 1
        assert servers.down() == [f"http://127.0.0.1:{free_port}"]
        assert runs(server, model)
    finally:
        servers.close()


# -- a server of its own, which takes adapters and dies ------------------------------------------------------------


@pytest.fixture(scope="module")
def other(sglang_python: Path, sglang_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that takes adapters, with the session's model."""
    log = tmp_path_factory.mktemp("adapters") / "server.log"
    flags = ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native", "--max-loras-per-batch", "2"]
    targets = ["--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    made = start_server(
        sglang_python, sglang_server.model, log, "--skip-tokenizer-init", *flags, *targets, SGL_CPU_NO_PIN="1"
    )
    yield made
    made.end()


@pytest.fixture
def adapted(other: Any) -> Decoder:
    """The model with an adapter that says something."""
    model = load_model(other.model)
    apply_lora(model, r=4, alpha=8, dropout=0.5, seed=1)
    step(model, 1)
    return model


def tie_adapter(servers: Servers, model: Decoder, place: Path, base: Path) -> WeightSync:
    way = make_way(
        "adapter", servers, folder=place, start=base, save_adapter=lambda folder: save_adapter(model, folder, base)
    )
    return WeightSync(servers, way, Parity(score_with(model), model.config.vocab_size, TOLERANCE), base)


def test_an_adapter_is_applied_and_only_where_it_is_named(other: Any, adapted: Decoder, tmp_path: Path) -> None:
    servers = Servers([other.url], patience_seconds=5.0)
    sync = tie_adapter(servers, adapted, tmp_path, other.model)
    engine = SGLangEngine(servers, vocab_size=adapted.config.vocab_size, sync=sync)
    try:
        for version in (1, 2, 3):  # three are pushed, two are kept
            step(adapted, version)
            engine.load_weights(version, merged_state(adapted))
            for temperature in (1.0, 0.7):
                asked = request(temperature)
                got = asyncio.run(engine.generate(asked))
                assert got.policy_version == version
                assert difference(adapted, asked, got) <= TOLERANCE
                with adapter_off(adapted):
                    assert difference(adapted, asked, got) > 10 * TOLERANCE
        with adapter_off(adapted):
            assert runs(other, adapted)  # without its name nobody gets it
        cards = servers.get(other.url, "/v1/models")["data"]
        assert sorted(card["id"] for card in cards if card["id"].startswith("gymtune")) == ["gymtune-v2", "gymtune-v3"]
        again = tie_adapter(servers, adapted, tmp_path, other.model)  # another run, which begins at 3
        again.push(3, {})
        assert [card["id"] for card in servers.get(other.url, "/v1/models")["data"][1:]] == ["gymtune-v3"]
    finally:
        engine.close()


def test_requests_end_with_the_adapter_they_began_with(other: Any, adapted: Decoder, tmp_path: Path) -> None:
    servers = Servers([other.url], patience_seconds=5.0)
    engine = SGLangEngine(
        servers,
        vocab_size=adapted.config.vocab_size,
        sync=tie_adapter(servers, adapted, tmp_path, other.model),
    )
    asked = [request(tokens=200, session=str(number)) for number in range(4)]

    async def swap() -> list[Generation]:
        engine.load_weights(1, {})
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0.5)
        early.append(copied(adapted, other.model, tmp_path / "copy"))
        step(adapted, 2)
        await asyncio.to_thread(engine.load_weights, 2, {})
        return await asyncio.gather(*running)

    early: list[Decoder] = []
    try:
        ended = asyncio.run(swap())
        for one, got in zip(asked, ended, strict=True):
            assert (got.policy_version, got.spans) == (1, ())
            assert difference(early[0], one, got) <= TOLERANCE
        assert max(len(got.ids) for got in ended) > 20
        assert asyncio.run(engine.generate(request())).policy_version == 2
    finally:
        engine.close()


def copied(model: Decoder, base: Path, place: Path) -> Decoder:
    """Return a copy of a model with an adapter."""
    save_adapter(model, place, base)
    copy = load_model(base)
    load_adapter(copy, place)
    return copy


def test_a_server_without_lora_says_how_to_start_it(server: Any, model: Decoder, tmp_path: Path) -> None:
    servers = Servers([server.url], patience_seconds=5.0)
    apply_lora(model, r=2, alpha=4, seed=0)
    try:
        with pytest.raises(Refused, match="start the server with --enable-lora"):
            tie_adapter(servers, model, tmp_path, server.model).push(1, {})
    finally:
        servers.close()


def test_a_server_that_dies_in_a_broadcast_ends_it(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this server."""
    model = load_model(other.model)
    servers = Servers([other.url], patience_seconds=0.0)
    sync = WeightSync(
        servers, DistributedWay(servers), Parity(score_with(model), model.config.vocab_size, TOLERANCE), other.model
    )
    try:
        sync.push(1, merged_state(model))
        monkeypatch.setattr(dist, "broadcast", killing(other, dist.broadcast))
        with pytest.raises(Unreachable):
            sync.push(2, merged_state(model))
        assert servers.down() == [other.url]
    finally:
        sync.close()
        servers.close()


def killing(server: Any, broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return a broadcast before which the server dies, after it was told what would come."""

    def late(*given: Any, **named: Any) -> Any:
        time.sleep(0.5)
        os.killpg(server.process.pid, signal.SIGKILL)
        return broadcast(*given, **named)

    return late
