"""Stop strings on a real server that has a tokenizer: turns end where the torch engine ends them, and early."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_fixtures import RealServer, start_server

from gymtune.agents import GenerateRequest, Renderer, Sampling
from gymtune.agents.models import load_model
from gymtune.agents.sglang import Servers, SGLangEngine
from gymtune.agents.torch_engine import TorchEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow]  # a server of its own


@pytest.fixture(scope="module")
def reader(sglang_python: Path, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = start_server(sglang_python, sglang_model, tmp_path_factory.mktemp("log") / "server.log")
    yield server
    server.end()


def test_turns_end_where_the_torch_engine_ends_them(reader: RealServer):
    model, renderer = load_model(reader.model), Renderer.from_folder(reader.model)
    reference = TorchEngine(model)
    engine = SGLangEngine(Servers([reader.url]), vocab_size=model.config.vocab_size)

    def ask(prompt: list[int], stop: tuple[str, ...] = ()) -> GenerateRequest:
        sampling = Sampling(temperature=0, max_new_tokens=48, stop=stop)
        return GenerateRequest(prompt, sampling, renderer.stop_ids, 1, str(prompt), decode=renderer.decode)

    async def compare() -> list[bool]:
        cut = []
        for k in range(1, 13):
            whole = await reference.generate(ask([k, 7, k + 1]))
            text = renderer.decode(whole.ids)
            places = [slice(n, n + 3) for n in (4, 9, 20)]  # borders of tokens lie anywhere
            for stop in [text[place] for place in places if len(text) > place.stop]:
                ours = await reference.generate(ask([k, 7, k + 1], ("never", stop)))
                theirs = await engine.generate(ask([k, 7, k + 1], ("never", stop)))
                assert (theirs.ids, theirs.finish_reason) == (ours.ids, ours.finish_reason), stop
                cut.append(len(ours.ids) < len(whole.ids))
        return cut

    cut = asyncio.run(compare())
    assert sum(cut) > 12
    body = {"input_ids": [1, 7, 2], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    assert "text" in engine.servers.post(reader.url, "/generate", body)  # it has a tokenizer, so it got the strings
    engine.close()
