"""The backend over servers in this process: what is refused before it is sent, what an answer becomes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gymtune.agents import GenerateRequest, Generation, Sampling
from gymtune.agents.sglang import Servers, SGLangEngine
from gymtune.tools.errors import ConfigError, RunError

INFO = {"model_path": "m", "weight_version": "default", "is_generation": True}
PAGE = {"version": "0.5.23", "max_req_input_len": 100, "skip_tokenizer_init": True}


class Model:
    """A server whose model says the same ids every time."""

    def __init__(self, ids: Sequence[int] = (5, 6, 7), spans: Any = None, info: Any = INFO, page: Any = PAGE) -> None:
        self.ids, self.info, self.page = list(ids), info, page
        self.spans = spans or [{"version": "default", "start": 0, "end": len(self.ids)}]

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path in ("/model_info", "/server_info"):
            told = self.info if path == "/model_info" else self.page
            return (404, {"detail": "Not Found"}) if told is None else (200, told)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": len(self.ids)},
            "output_token_logprobs": [[-1.0 - k, token, None] for k, token in enumerate(self.ids)],
            "weight_versions": self.spans,
        }
        return 200, {"output_ids": self.ids, "meta_info": meta}


class Pushes:
    """A sync that notes what it gets."""

    def __init__(self, **extra: Any) -> None:
        self.extra, self.pushed, self.closed = extra, [], False

    def push(self, version: int, weights: Any) -> None:
        self.pushed.append((version, weights))

    def extra_fields(self) -> dict[str, Any]:
        return self.extra

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine():
    """Makes engines, and closes them."""
    made: list[SGLangEngine] = []

    def make(*urls: str, **options: Any) -> SGLangEngine:
        servers = Servers(urls, patience_seconds=1.0)
        try:
            made.append(SGLangEngine(servers, **{"vocab_size": 50, **options}))
        except (RunError, ConfigError):
            servers.close()
            raise
        return made[-1]

    yield make
    for one in made:
        one.close()


def generate(engine: SGLangEngine, prompt=(1, 2), decode=None, **sampling: Any) -> Generation:
    request = GenerateRequest(list(prompt), Sampling(**sampling), (9,), seed=1, session="s", decode=decode)
    return asyncio.run(engine.generate(request))


def test_a_generation(double, engine):
    server = double(Model())
    found = generate(engine(server.url, version=4))
    assert found == Generation([5, 6, 7], [-1.0, -2.0, -3.0], "length", policy_version=4)


@pytest.mark.parametrize(
    ("spans", "oldest", "told"),
    [
        ([("12", 0, 3)], 12, ()),
        ([("12", 0, 1), ("13", 1, 3)], 12, ((12, 0, 1), (13, 1, 3))),
        ([("12", 0, 1), ("12", 1, 3)], 12, ()),  # a pause without new weights
        ([("default", 0, 2), ("1", 2, 3)], 0, ((0, 0, 2), (1, 2, 3))),
    ],
)
def test_versions_of_a_turn(double, engine, spans, oldest, told):
    named = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    found = generate(engine(double(Model(spans=named)).url))
    assert (found.policy_version, found.spans) == (oldest, told)


def test_an_adapter_names_the_version(double, engine):
    server = double(Model())
    found = generate(engine(server.url, sync=Pushes(lora_path="gymtune-v8")))
    assert server.sent("/generate")[0]["lora_path"] == "gymtune-v8"
    assert (found.policy_version, found.spans) == (8, ())


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "got 0"), ([1] * 40, "1 to 39 tokens .* got 40"), ([1, 50], "token id 50"), ([-1], "token id -1")],
)
def test_what_would_end_the_server_is_never_sent(double, engine, prompt, words):
    server = double(Model())
    with pytest.raises(ConfigError, match=words):
        generate(engine(server.url, max_model_length=40), prompt)
    assert server.sent("/generate") == []


@pytest.mark.parametrize(("length", "wanted", "sent"), [(2, 30, 30), (15, 30, 25), (39, 30, 1)])
def test_no_more_is_asked_for_than_fits(double, engine, length, wanted, sent):
    server = double(Model([5]))
    generate(engine(server.url, max_model_length=40), [1] * length, max_new_tokens=wanted)
    assert server.sent("/generate")[0]["sampling_params"]["max_new_tokens"] == sent


def test_the_shortest_of_all_lengths_counts(double, engine):
    long, short = double(Model(page={**PAGE, "max_req_input_len": 200})), double(Model())
    assert engine(long.url, short.url).max_model_length == 100
    assert engine(long.url, short.url, max_model_length=150).max_model_length == 100
    assert engine(long.url, short.url, max_model_length=80).max_model_length == 80
    router = double(Model(page=None))
    assert engine(router.url, max_model_length=80).max_model_length == 80
    with pytest.raises(ConfigError, match="does not say how long a sequence may be: give max_model_length"):
        engine(router.url)


def test_a_model_that_embeds_is_refused(double, engine):
    with pytest.raises(ConfigError, match="embeds, it samples nothing"):
        engine(double(Model(info={**INFO, "is_generation": False})).url)


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)  # 5, 6, 7: fgh


@pytest.mark.parametrize(
    ("stop", "ids", "finish"),
    [
        (("g",), [5, 6], "stop"),
        (("fg", "h"), [5, 6], "stop"),
        (("h",), [5, 6, 7], "stop"),
        (("x",), [5, 6, 7], "length"),
    ],
)
def test_a_turn_is_cut_behind_the_token_that_completes_a_stop_string(double, engine, stop, ids, finish):
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]
    server = double(Model(spans=spans))
    found = generate(engine(server.url), decode=letters, stop=stop)
    assert (found.ids, found.logprobs, found.finish_reason) == (ids, [-1.0, -2.0, -3.0][: len(ids)], finish)
    assert found.spans == (((1, 0, 2), (2, 2, 3)) if len(ids) == 3 else ())
    assert server.sent("/generate")[0]["sampling_params"]["stop"] is None


def test_a_server_that_reads_text_gets_the_stop_strings(double, engine):
    server = double(Model(page={**PAGE, "skip_tokenizer_init": False}))
    generate(engine(server.url), decode=letters, stop=("g",))
    assert server.sent("/generate")[0]["sampling_params"]["stop"] == ["g"]


def test_weights_go_by_the_sync(double, engine):
    server, sync = double(Model()), Pushes()
    made = engine(server.url, sync=sync)
    made.load_weights(3, {"w": None})
    assert (sync.pushed, made.version) == ([(3, {"w": None})], 3)
    made.close()
    assert sync.closed
    with pytest.raises(RunError, match="nothing says how version 3 reaches the servers"):
        engine(server.url).load_weights(3, {})
