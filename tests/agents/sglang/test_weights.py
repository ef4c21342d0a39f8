"""Weights on their way, against a double that keeps the rules of a server: order, versions, ends, files, faults."""

import base64
import pickle
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from gymtune.agents.models import load_any, load_foreign, load_model, merged_state
from gymtune.agents.models.decoder import Decoder
from gymtune.agents.sglang import Drifted, Refused, ServerError, Servers, Unreachable, WrongVersion
from gymtune.agents.sglang.disk import VersionFolders
from gymtune.agents.sglang.distributed import DistributedWay
from gymtune.agents.sglang.parity import Parity, default_tolerance, score_with
from gymtune.agents.sglang.tensor import pack
from gymtune.agents.sglang.ways import Way, buckets, update_session
from gymtune.agents.sglang.weights import WeightSync, make_way
from gymtune.tools.errors import ConfigError, RunError

PAUSE, CONTINUE, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"
DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
EXACT = 1e-6  # float32 against float64, on log-probs of size 10


class Server:
    """The rules that a real server keeps, as far as weights go. What it holds is in `weights`, by name."""

    def __init__(self, model: Decoder, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.version, self.paused, self.open = "default", False, False
        self.knows_sessions = True
        self.flushes = 0  # that are refused first
        self.refuses: dict[str, tuple[int, Any] | None] = {}

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
        if path in self.refuses:
            return self.refuses[path]
        name = path.removeprefix("/").partition("?")[0]
        return getattr(self, name)(body)

    def model_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"model_path": str(self.folder), "weight_version": self.version, "model_type": "qwen3"}

    def server_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"tp_size": 2, "version": "0.5.23"}

    def pause_generation(self, body: Any) -> tuple[int, Any]:
        assert body == {"mode": "retract"}
        self.paused = True
        return 200, {"status": "ok"}

    def continue_generation(self, _: Any) -> tuple[int, Any]:
        self.paused = False
        return 200, {"status": "ok"}

    def flush_cache(self, _: Any) -> tuple[int, Any]:
        self.flushes -= 1
        return (400, "pending requests") if self.flushes >= 0 else (200, "Cache flushed.")

    def begin_weight_update(self, _: Any) -> tuple[int, Any]:
        if not self.knows_sessions:
            return 404, {"detail": "Not Found"}
        if self.open:
            return 400, {"success": False, "message": "a weight-update session is already open; call end first"}
        self.open = True
        return 200, {"success": True}

    def end_weight_update(self, _: Any) -> tuple[int, Any]:
        self.open = False
        return 200, {"success": True}

    def update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        folder = Path(body["model_path"])
        if not folder.is_dir():
            return 400, {"success": False, "message": f"no folder {folder}"}
        self.model = load_any(folder)  # type: ignore[assignment]
        self.version = body["weight_version"]
        return 200, {"success": True}

    def update_weights_from_tensor(self, body: Any) -> tuple[int, Any]:
        assert self.open or not self.knows_sessions
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == 2  # one for each of its ranks
        assert payloads[0] == payloads[1]
        self.model.load_state_dict(dict(pickle.loads(base64.b64decode(payloads[0]))), strict=False)
        self.version = body["weight_version"]
        return 200, {"success": True}

    def generate(self, body: Any) -> tuple[int, Any]:
        assert not self.paused, "a paused server would let this wait for ever"
        ids = body["input_ids"]
        scores = [None, *score_with(self.model)(ids)]
        rows = [[score, token, None] for score, token in zip(scores, ids, strict=True)]
        meta = {"id": "x", "weight_version": self.version, "input_token_logprobs": rows, "output_token_logprobs": []}
        return 200, {"output_ids": [], "meta_info": {**meta, "finish_reason": {"type": "length", "length": 0}}}


@pytest.fixture
def model(tiny_model: Path) -> Decoder:
    return load_model(tiny_model)


@pytest.fixture
def rules(tiny_model: Path) -> Server:
    return Server(load_model(tiny_model), tiny_model)


@pytest.fixture
def connect() -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def to(*urls: str, patience: float = 5.0) -> Servers:
        made.append(Servers(urls, patience_seconds=patience))
        return made[-1]

    yield to
    for servers in made:
        servers.close()


@pytest.fixture
def link(model: Decoder, double: Any, connect: Any, tmp_path: Path, tiny_model: Path) -> Callable[..., Any]:
    """Makes what brings weights to a double: the double, the client, and the sync."""

    def make(rules: Any, name: Any = "tensor", patience: float = 5.0) -> tuple[Any, Servers, WeightSync]:
        one = double(rules)
        servers = connect(one.url, patience=patience)
        way = make_way(name, servers, folder=tmp_path, start=tiny_model)
        return one, servers, WeightSync(servers, way, parity_of(model))

    return make


def parity_of(model: Decoder, tolerance: float = 1e-4) -> Parity:
    return Parity(score_with(model), model.config.vocab_size, tolerance)


def moved(model: Decoder) -> Mapping[str, Tensor]:
    """Move the model's weights and return them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return merged_state(model)


# -- the steps of a push -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sent"), [("disk", [DISK]), ("tensor", [BEGIN, TENSOR, END])])
def test_the_steps_of_a_push(name: str, sent: list[str], rules: Server, model: Decoder, link: Any) -> None:
    one, _, sync = link(rules, name)
    rules.flushes = 2
    sync.push(12, moved(model))
    paths = [path for _, path, _ in one.seen if not path.endswith("_info")]
    assert paths == [PAUSE, *sent, FLUSH, FLUSH, FLUSH, CONTINUE, "/generate", "/generate"]
    assert (rules.version, rules.paused, rules.open) == ("12", False, False)
    assert sync.metrics["sync/logprob_gap"] <= EXACT
    assert sync.metrics["sync/servers"] == 1
    assert sync.metrics["sync/seconds"] > 0
    assert sync.extra_fields() == {}


def test_an_older_server_knows_no_sessions(rules: Server, model: Decoder, link: Any) -> None:
    rules.knows_sessions = False
    one, _, sync = link(rules)
    sync.push(1, moved(model))
    assert not one.sent(END)
    assert rules.version == "1"


def test_a_session_that_a_dead_trainer_left_open_is_closed(rules: Server, double: Any, connect: Any) -> None:
    rules.open = True
    one = double(rules)
    servers = connect(one.url)
    with update_session(servers, one.url):
        assert rules.open
    assert not rules.open
    assert [path for _, path, _ in one.seen] == [BEGIN, END, BEGIN, END]


@pytest.mark.parametrize("path", [PAUSE, BEGIN, TENSOR, END, FLUSH])
@pytest.mark.parametrize("answer", [(400, {"error": {"message": "out of order"}}), (500, "boom")])
def test_a_server_is_never_left_paused(
    path: str, answer: Any, rules: Server, model: Decoder, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymtune.agents.sglang.ways._FLUSH_SECONDS", 0.3)
    rules.refuses[path] = answer
    one, _, sync = link(rules)
    with pytest.raises(ServerError, match=r"out of order|boom"):
        sync.push(1, moved(model))
    assert one.seen[-1][1] == CONTINUE
    assert not rules.paused


def test_what_is_sent_in_parts_bears_no_version_but_with_the_last() -> None:
    weights = {name: torch.zeros(size) for name, size in [("a", 10), ("b", 10), ("c", 100), ("d", 5), ("e", 5)]}
    found = list(buckets(weights, 3, limit=80))  # bytes: 20 floats
    assert [[name for name, _ in part] for part, _ in found] == [["a", "b"], ["c"], ["d", "e"]]
    assert [version for _, version in found] == ["3-partial", "3-partial", "3"]


def test_a_push_that_breaks_off_leaves_no_version_of_either(
    rules: Server, model: Decoder, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymtune.agents.sglang.tensor.buckets", lambda *given: buckets(*given, limit=4096))
    updates = 0

    def handle(method: str, path: str, body: Any) -> Any:
        nonlocal updates
        updates += path == TENSOR
        return None if updates == 3 else rules(method, path, body)

    one, servers, sync = link(handle, patience=0.0)
    rules.version = "1"
    with pytest.raises(Unreachable):
        sync.push(2, moved(model))
    assert rules.version == "2-partial"
    assert servers.down() == [one.url]


def test_a_view_is_sent_without_the_rest_of_its_storage() -> None:
    whole = torch.arange(10_000.0)
    sent = base64.b64decode(pack([("a", whole[:10]), ("b", whole[:100].view(10, 10).T)]))
    found = dict(pickle.loads(sent))
    assert torch.equal(found["a"], whole[:10])
    assert torch.equal(found["b"], whole[:100].view(10, 10).T)
    assert len(sent) < 3000


# -- parity ------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_a_plain_softmax(model: Decoder) -> None:
    from gymtune.agents.models import CausalAttend

    ids = parity_of(model).prompts[0]
    for temperature in (1.0, 0.7):
        with torch.no_grad():
            hidden = model.double()(torch.tensor([ids]), torch.arange(len(ids))[None], CausalAttend())
            logits = (hidden[0] @ model.head_weight.T) / temperature
        wanted = [float(row[token] - row.exp().sum().log()) for row, token in zip(logits, ids[1:], strict=False)]
        assert score_with(model.float(), temperature)(ids) == pytest.approx(wanted, abs=EXACT * 10)


def test_scoring_leaves_a_model_in_training(model: Decoder) -> None:
    model.train()
    score_with(model)([1, 2, 3])
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("vocab_size", [7, 100_000])
def test_the_prompts_are_fixed_and_in_the_vocabulary(vocab_size: int) -> None:
    prompts = Parity(lambda _: [], vocab_size, 1.0).prompts
    assert [len(ids) for ids in prompts] == [32, 2]
    assert prompts == Parity(lambda _: [], vocab_size, 1.0).prompts
    assert all(0 <= token < vocab_size for ids in prompts for token in ids)


@pytest.mark.parametrize(("off", "drifts"), [(0.0, False), (0.09, False), (0.11, True), (float("nan"), True)])
def test_a_gap_beyond_the_tolerance_is_drift(
    off: float, drifts: bool, rules: Server, model: Decoder, double: Any, connect: Any
) -> None:
    one = double(rules)
    servers, parity = connect(one.url), parity_of(model, tolerance=0.1)
    rules.version = "5"
    expected = parity.measure()
    expected[1][0] += off
    if drifts:
        with pytest.raises(
            Drifted, match=r"version 5 was pushed, .* differ by .* from the trainer's, 0\.1 are let pass"
        ):
            parity.check(servers, one.url, 5, expected, {})
    else:
        assert parity.check(servers, one.url, 5, expected, {}) == pytest.approx(off, abs=EXACT)


def test_the_tolerance_is_64_roundings() -> None:
    assert default_tolerance(torch.float32) == 1e-3
    assert default_tolerance(torch.bfloat16) == 64 * 2**-7 == 0.5
    assert default_tolerance(torch.float16) == 64 * 2**-10


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_a_whole_model_and_two_are_kept(rules: Server, model: Decoder, link: Any, tmp_path: Path) -> None:
    for left in ("v000099", ".v000007.partial"):  # by a run that died
        (tmp_path / left).mkdir()
    (tmp_path / "notes").mkdir()
    _, _, sync = link(rules, "disk")
    for version in (1, 2, 3, 3):
        weights = moved(model)
        sync.push(version, weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "v000002", "v000003"]
    found = merged_state(load_any(tmp_path / "v000003"))
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert (tmp_path / "v000003" / "tokenizer.json").is_file()


def test_a_model_of_transformers_with_a_tied_head_is_written_as_its_files_are(
    rules: Server, link: Any, tmp_path: Path, tiny_model: Path
) -> None:
    foreign = load_foreign(tiny_model)
    weights = merged_state(foreign)
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    sync = link(rules, "disk")[2]
    sync.parity = Parity(score_with(foreign), foreign.config.vocab_size, 1e-4)
    sync.push(1, weights)
    with safe_open(tmp_path / "v000001" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == weights.keys() - {"lm_head.weight"}


def test_a_full_disk_changes_nothing(rules: Server, model: Decoder, link: Any, tmp_path: Path) -> None:
    one, _, sync = link(rules, "disk")
    sync.push(1, merged_state(model))
    seen = len(one.seen)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"v000002: cannot write the weights of version 2: .*Make room"):
            sync.push(2, moved(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]
    assert len(one.seen) == seen  # no server has heard of it
    sync.push(2, merged_state(model))
    assert rules.version == "2"


def test_folders_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert VersionFolders(Path("weights")).write(1, lambda folder: None) == tmp_path / "weights" / "v000001"


# -- servers that are gone, or are others --------------------------------------------------------------------------


def test_a_server_that_is_gone_is_left_out_and_has_the_weights_when_it_is_back(
    rules: Server, model: Decoder, double: Any, connect: Any, tmp_path: Path, tiny_model: Path, free_port: int
) -> None:
    late = Server(load_model(tiny_model), tiny_model)
    gone = f"http://127.0.0.1:{free_port}"
    servers = connect(double(rules).url, gone)
    sync = WeightSync(servers, make_way("disk", servers, folder=tmp_path, start=tiny_model), parity_of(model))
    sync.push(1, moved(model))
    assert sync.metrics["sync/servers"] == 1
    assert servers.down() == [gone]
    double(late).stop()
    back = double(late)
    back.stop()
    back.start(free_port)
    until = time.monotonic() + 10.0
    while servers.down() and time.monotonic() < until:
        time.sleep(0.02)
    assert servers.down() == []
    assert (late.version, late.paused) == ("1", False)


def test_where_no_server_is_there_a_push_waits_for_one(
    rules: Server, model: Decoder, double: Any, connect: Any, tiny_model: Path, free_port: int
) -> None:
    servers = connect(f"http://127.0.0.1:{free_port}")
    sync = WeightSync(servers, make_way("tensor", servers, folder=tiny_model, start=tiny_model), parity_of(model))
    one = double(rules)
    one.stop()
    threading.Timer(0.5, one.start, [free_port]).start()
    sync.push(1, moved(model))
    assert rules.version == "1"


def test_where_no_server_comes_the_push_ends(model: Decoder, connect: Any, free_port: int) -> None:
    servers = connect(f"http://127.0.0.1:{free_port}", patience=0.1)
    sync = WeightSync(servers, make_way("tensor", servers, folder=Path(), start=Path()), parity_of(model))
    with pytest.raises(Unreachable, match=f"127.0.0.1:{free_port}"):
        sync.push(1, merged_state(model))


def test_a_server_with_another_version_is_refused(rules: Server, model: Decoder, double: Any, connect: Any) -> None:
    class Lazy(Way):
        def send(self, *_: object) -> None:
            """Send nothing."""

    servers = connect(double(rules).url)
    with pytest.raises(WrongVersion, match="version 1 was pushed, it says that it has 'default'"):
        WeightSync(servers, Lazy(servers), parity_of(model)).push(1, merged_state(model))
    assert not rules.paused


def test_weights_are_not_sent_to_a_server_of_another_model(
    rules: Server, model: Decoder, double: Any, connect: Any, tiny_model: Path, tmp_path: Path
) -> None:
    config = (tiny_model / "config.json").read_text()
    width = f'"hidden_size": {model.config.hidden_size}'
    (tmp_path / "config.json").write_text(config.replace(width, '"hidden_size": 999'))
    rules.folder = tmp_path  # a reward model, say
    one = double(rules)
    servers = connect(one.url)
    way = make_way("tensor", servers, folder=tmp_path, start=tiny_model)
    with pytest.raises(Refused, match=rf"serves {tmp_path}, whose hidden_size is 999, the policy is {tiny_model}"):
        WeightSync(servers, way, parity_of(model), tiny_model).push(1, merged_state(model))
    assert not one.sent(PAUSE)
    rules.folder = tiny_model
    WeightSync(servers, way, parity_of(model), tiny_model).push(1, merged_state(model))


def test_a_router_takes_no_weights(rules: Server, model: Decoder, link: Any) -> None:
    rules.refuses = {PAUSE: (404, {"detail": "Not Found"}), CONTINUE: (404, {"detail": "Not Found"})}
    with pytest.raises(Refused, match=r"is this a router\?.* give the addresses of its workers"):
        link(rules)[2].push(1, merged_state(model))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_server_that_takes_no_part_in_a_group_is_heard(
    rules: Server, model: Decoder, double: Any, connect: Any
) -> None:
    rules.refuses["/init_weights_update_group"] = (400, {"success": False, "message": "dp_size must be 1"})
    servers = connect(double(rules).url)
    with pytest.raises(Refused, match="dp_size must be 1"):
        WeightSync(servers, DistributedWay(servers, seconds=1.0), parity_of(model)).push(1, merged_state(model))
    assert not rules.paused


def test_an_adapter_needs_one_who_writes_it(connect: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has none: give lora_r, or use disk"):
        make_way("adapter", connect("http://127.0.0.1:1"), folder=tmp_path, start=tmp_path)
