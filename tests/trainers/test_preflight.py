"""Preflight: what fits is said, what is wrong is told all at once, and nothing is written."""

import json
import shutil
import socket

import gymnasium
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from gymtune.agents import ScriptedAgent, TrajectoryWriter, rollout
from gymtune.envs import ChatEnv, Task
from gymtune.envs.files import example_path
from gymtune.rewards.components import gt_component
from gymtune.rewards.contains import ContainsGt
from gymtune.tools.errors import ConfigError, DataError, EnvError, GymtuneError, ModelError
from gymtune.tools.messages import user
from gymtune.trainers import TrainConfig
from gymtune.trainers import preflight as preflight_module
from gymtune.trainers.preflight import preflight

ARITHMETIC, GENEROUS = "gymtune/Arithmetic-v0", "gymtune-test/Generous-v0"


class Generous(ChatEnv):
    """Pays for everything, junk too."""

    def __init__(self, **options):
        super().__init__([Task("t", (user("Say yes."),), "yes")], [gt_component(ContainsGt())], **options)

    def step(self, action):
        """Take any answer for the right one."""
        return super().step("yes")


if GENEROUS not in gymnasium.registry:
    gymnasium.register(GENEROUS, entry_point=Generous)


@pytest.fixture
def config(tiny_model, tmp_path):
    """Make a config that is right but for `changes`."""

    def make(algo="grpo", **changes):
        base = {"model": str(tiny_model), "output_dir": str(tmp_path / "run")}
        if algo == "sft" or "trajectories" in changes:
            return TrainConfig(algo=algo, **(base | changes))
        return TrainConfig(algo=algo, **(base | {"env": ARITHMETIC} | changes))

    return make


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy of the tiny model, to be broken."""
    return shutil.copytree(tiny_model, tmp_path / "broken")


def wrong(found):
    return {finding.what: finding.came for finding in found.findings if finding.verdict == "wrong"}


def said(found, what):
    return next(finding.came for finding in found.findings if finding.what == what)


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_everything_that_is_given_is_looked_at(config, tmp_path):
    found = preflight(config(lora_r=2, eval_steps=5))
    assert wrong(found) == {}
    assert [finding.what for finding in found.findings] == [
        "model", "tokenizer", "context", "LoRA", "device", "rewards", "env", "reward", "env contract", "evaluation",
        "output", "disk",
    ]  # fmt: skip
    assert said(found, "model").startswith("qwen3, dense, width 32, 2 layers, 4 heads (2 of keys), vocabulary ")
    assert said(found, "LoRA") == "14 matrices get an adapter of rank 2"
    assert said(found, "reward") == "gt x 1"
    found.refuse()
    assert list(tmp_path.iterdir()) == []


def test_what_was_read_is_kept(config, sums_file, tiny_model):
    found = preflight(config("sft", data=str(sums_file)))
    assert len(found.dataset.everything()) == 400
    assert found.renderer.tokenizer.name_or_path == str(tiny_model)
    assert said(found, "data") == "400 episodes"


def test_stored_groups(config, sampled_file, taught_model):
    found = preflight(config(trajectories=str(sampled_file), model=str(taught_model)))
    assert wrong(found) == {}
    assert said(found, "trajectories") == "24 groups of 96 episodes"
    assert "env" not in [finding.what for finding in found.findings]
    assert any("have equal rewards: they teach nothing" in note for note in found.notes)


def test_a_resumed_run_has_an_output_folder(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert "already holds another run" in wrong(preflight(config()))["output"]
    assert wrong(preflight(config(), resume=True)) == {}


def test_a_full_disk_is_told_and_stops_nobody(config, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    found = preflight(config())
    assert wrong(found) == {}
    assert "0.0 GB are free" in found.notes[0]


def test_what_the_disk_must_hold(config, monkeypatch):
    """Weights of P numbers in float32: 3 x 4 P bytes a checkpoint, three of them at once, and two models."""
    parameters = preflight(config()).facts.parameters
    needed, usage = 3 * 3 * 4 * parameters + 2 * 4 * parameters, shutil.disk_usage("/")
    for free, notes in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert len(preflight(config(max_steps=200)).notes) == notes


# -- six broken set-ups ------------------------------------------------------------------------------------------------


def test_weights_that_are_not_all_there(config, folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.extra"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors")
    found = preflight(config(model=str(folder)))
    assert (
        "model.extra wanted nothing found (2,); model.norm.weight wanted (32,) found nothing" in wrong(found)["model"]
    )
    with pytest.raises(ModelError, match=r"model\.extra"):
        found.refuse()


def test_a_tokenizer_that_is_bigger_than_the_embedding(config, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"new{i}" for i in range(500)])
    tokenizer.save_pretrained(folder)
    assert "tokens, the model's embedding" in wrong(preflight(config(model=str(folder))))["tokenizer"]


def test_an_env_that_breaks_its_contract(config):
    found = preflight(config(env=GENEROUS))
    assert "saying nothing scores nothing: task t: '' earned 1.0" in wrong(found)["env contract"]
    with pytest.raises(EnvError, match=f"env '{GENEROUS}' breaks its contract"):
        found.refuse()


def test_a_data_file_with_broken_records(config, tmp_path):
    lines = example_path("agentic").read_text().splitlines()
    record = json.loads(lines[1])
    record["gt"] = None
    lines[1] = json.dumps(record)
    (tmp_path / "agentic.jsonl").write_text("\n".join([*lines, "{"]) + "\n")
    env_args = {"data": str(tmp_path / "agentic.jsonl")}
    told = wrong(preflight(config(env="gymtune/ToolUse-v0", env_args=env_args)))["env_args.data"]
    assert "line 2: " in told
    assert f"line {len(lines) + 1}: " in told


def test_episodes_that_nobody_sampled(config, sums_file):
    found = preflight(config(trajectories=str(sums_file)))
    told = wrong(found)["trajectories"]
    assert "no log-probs of what was said, so no policy sampled it" in told
    assert told.count("(agent 'scripted')") == 10
    assert told.endswith("and 390 more")
    with pytest.raises(DataError):
        found.refuse()


def test_a_critic_of_another_vocabulary(config, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    told = wrong(preflight(config("ppo", critic_model=str(folder))))["critic"]
    assert "has another vocabulary than the policy" in told
    assert "'zebra'" in told


def test_a_reward_server_has_to_answer(config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/score"
        assert wrong(preflight(config(reward_model=url))) == {}
    assert "nobody answers at port" in wrong(preflight(config(reward_model=url)))["reward server"]


@pytest.mark.parametrize(
    ("changes", "what", "message"),
    [
        ({"model": "nowhere"}, "model", "nowhere: no such model folder"),
        ({"max_model_length": 513}, "context", "max_model_length 513 is more than the 512"),
        ({"lora_r": 2, "lora_target_modules": "q_prj"}, "LoRA", "no matrix of the layers is named 'q_prj'. Did you"),
        ({"device": "cuda:99"}, "device", "device 'cuda:99' is not there"),
        ({"env": "gymtune/Arithmetik-v0"}, "env", "Did you mean 'gymtune/Arithmetic-v0'?"),
        ({"env_args": {"levls": [1]}}, "env", "takes no argument 'levls'"),
        ({"env_args": {"data": "gone.jsonl"}, "env": "gymtune/Math-v0"}, "env_args.data", "gone.jsonl"),
        ({"reward_weights": {"gone:f": 1.0}}, "rewards", "gone"),
        ({"reward_weights": {"gt": 0.0}}, "reward", "pays for nothing"),
        ({"reward_model": "nowhere"}, "rewards", "reward model 'nowhere': no such model folder"),
        ({"thinking_ratio": 0.5}, "tokenizer", "reads neither"),
        ({"chat_template_kwargs": {"thinkin": True}}, "tokenizer", "'thinkin'"),
        ({"eval_steps": 1, "eval_env_args": {"splt": "x"}}, "evaluation", "takes no argument 'splt'"),
        ({"output_dir": "/dev/null/run"}, "output", "cannot write: /dev/null is no folder"),
    ],
)
def test_each_fault_has_its_name(config, changes, what, message):
    assert message in wrong(preflight(config(**changes)))[what]


# -- files to learn from -----------------------------------------------------------------------------------------------


@pytest.fixture
def learn(tiny_model, tmp_path):
    """Make a config that learns from rows; several values of `margin` make several pairs."""

    def make(algo, rows, **changes):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return TrainConfig(algo=algo, model=str(tiny_model), output_dir=str(tmp_path / "r"), data=str(path), **changes)

    return make


def pairs(*margins):
    rows = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b", "margin": margin} for n, margin in enumerate(margins)]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize(
    ("algo", "changes", "told"),
    [
        ("dpo", {}, "2 pairs"),
        ("kto", {}, "2 good and 2 bad replies"),
        ("sft", {}, "2 chosen replies"),
        ("reward", {"margin": "column"}, "2 pairs of whole conversations"),
    ],
)
def test_what_a_file_is_for_an_algorithm(learn, algo, changes, told):
    found = preflight(learn(algo, pairs(1, 0.5), **changes))
    assert (said(found, "data"), wrong(found)) == (told, {})
    assert [finding.came for finding in found.findings if finding.what == "data options"] == list(changes)


@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("dpo", {"pairs": "all"}),
        ("reward", {"ties": "half"}),
        ("kto", {"label_threshold": 0.5}),
        ("sft", {"min_reward": 1.0, "best_of": 2}),
    ],
)
def test_an_option_that_a_file_leaves_nothing_to_say_is_refused(learn, algo, changes, sampled_file, taught_model):
    came = wrong(preflight(learn(algo, pairs(1, 2), **changes)))["data options"]
    assert came.startswith(f"{', '.join(changes)}: read of the rewards of episodes alone, and ")
    assert came.endswith("is of the kind preference")
    changes |= {"data": str(sampled_file), "model": str(taught_model)}
    assert "data options" not in wrong(preflight(learn(algo, []).model_copy(update=changes)))


def test_margins_that_are_not_there_are_told_with_their_lines(learn):
    found = preflight(learn("reward", pairs(1, None, 2, "3", True), margin="column"))
    assert wrong(found)["data options"].endswith("wants a number in the column margin, not so on lines 2, 4, 5")
    assert wrong(preflight(learn("reward", pairs(1, None)))) == {}


# -- all at once -------------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_told_at_once(config, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer_config.json").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note").write_text("mine")
    changes = {"device": "cuda:99", "env_args": {"levls": [1]}, "reward_model": "nowhere", "critic_model": "nowhere"}
    found = preflight(config("ppo", model=str(folder), **changes))
    assert list(wrong(found)) == ["model", "tokenizer", "critic", "device", "rewards", "env", "output"]
    assert all(finding.mend for finding in found.findings if finding.verdict == "wrong")
    with pytest.raises(ConfigError) as caught:
        found.refuse()
    assert str(caught.value).startswith("7 things are wrong; --preflight shows them as a table. (1) model: ")
    for what, came in wrong(found).items():
        assert f"{what}: {came}" in str(caught.value)


def test_without_a_model_the_file_is_read_line_by_line(config, tmp_path):
    path = tmp_path / "data.jsonl"
    with TrajectoryWriter(path) as writer:
        for trajectory in rollout(ARITHMETIC, ScriptedAgent(), 2):
            writer.append(trajectory)
    found = preflight(config("sft", data=str(path), model="nowhere"))
    assert said(found, "data") == "2 episodes, looked at no further without a model"
    path.write_text(path.read_text() + "{}\n")
    assert "line 3" in wrong(preflight(config("sft", data=str(path), model="nowhere")))["data"]


def test_what_no_user_can_mend_is_not_caught(config, monkeypatch):
    def crash(folder):
        raise ZeroDivisionError

    monkeypatch.setattr(preflight_module, "inspect_model", crash)
    with pytest.raises(ZeroDivisionError):
        preflight(config())
    assert not issubclass(ZeroDivisionError, GymtuneError)
