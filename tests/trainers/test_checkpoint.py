"""Checkpoints: what others can open, what a crash leaves, what is refused."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from gymtune.agents.models import CausalAttend, load_model
from gymtune.tools.errors import RunError
from gymtune.trainers import Listeners, TrainConfig, train
from gymtune.trainers.checkpoint import load_state, load_updater, save_checkpoint, save_pretrained, write_aside
from gymtune.trainers.critic import make_critic
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP32 = 1e-5  # logits of two implementations


@pytest.fixture
def trained(tiny_model, config):
    """An updater after one step without tokens: every parameter has an optimizer state."""
    settings = config("sft")
    updater = Updater(load_model(tiny_model), ALGORITHMS["sft"](settings), settings)
    updater.update([[]], 0, UpdateStats())
    return updater


@pytest.fixture
def saved(trained, tiny_model, tmp_path):
    target = tmp_path / "checkpoints" / "step_000001"
    write_aside(target, lambda folder: save_checkpoint(folder, trained, tiny_model, {"step": 1, "tokens_seen": 7}))
    return target


def test_transformers_opens_it_with_equal_logits(trained, saved):
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(saved, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 1 + 2?"}], tokenize=False)
    ids = torch.tensor([tokenizer.encode(text)])
    assert ids.shape[1] > 5
    with torch.no_grad():
        ours = trained.model.logits(trained.model(ids, torch.arange(ids.shape[1])[None], CausalAttend()))
        assert torch.allclose(theirs(ids).logits, ours, rtol=0, atol=FP32)


def test_a_checkpoint_is_tensors_and_text(saved):
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json", ".jinja"}
    for path in saved.iterdir():
        head = path.read_bytes()[:2]
        assert head not in (b"PK", b"\x80\x04")  # zip and pickle
    assert load_state(saved) == {"step": 1, "tokens_seen": 7}


def test_the_optimizer_comes_back_bit_for_bit(trained, saved, config, tiny_model):
    fresh = Updater(load_model(tiny_model), trained.algorithm, config("sft"))
    for number, parameter in enumerate(trained.model.parameters()):
        trained.optimizer.state[parameter]["exp_avg"].fill_(number)
    save_checkpoint(saved, trained, tiny_model, {"step": 1})
    load_updater(saved, fresh, 1)
    for mine, other in zip(fresh.model.parameters(), trained.model.parameters(), strict=True):
        left, right = fresh.optimizer.state[mine], trained.optimizer.state[other]
        assert left.keys() == right.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left)


def test_what_was_loaded_does_not_hang_on_the_file(trained, saved):
    load_updater(saved, trained, 1)
    file = saved / "optimizer.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)  # in place: a mapped tensor would turn into NaN
    assert all(not state["exp_avg"].isnan().any() for state in trained.optimizer.state.values())


def test_an_optimizer_of_another_model_is_refused(trained, saved):
    file = saved / "optimizer.safetensors"
    tensors = load_file(file)
    name = "model.norm.weight"
    save_file(tensors | {f"{name}/exp_avg": torch.zeros(3)}, file)
    with pytest.raises(RunError, match=r"model.norm.weight/exp_avg \(3,\) does not belong to this model"):
        load_updater(saved, trained, 1)
    save_file(tensors | {"other/exp_avg": torch.zeros(3)}, file)
    with pytest.raises(RunError, match="other/exp_avg"):
        load_updater(saved, trained, 1)
    save_file({key: value for key, value in tensors.items() if not key.startswith(name)}, file)
    with pytest.raises(RunError, match=r"holds no state of model.norm.weight \(1 parameters lack it\)"):
        load_updater(saved, trained, 1)


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1'])
def test_broken_files_are_named(trained, saved, content):
    for name in ("optimizer.safetensors", "trainer_state.json"):
        if content is None:
            (saved / name).unlink()
        else:
            (saved / name).write_bytes(content)
    with pytest.raises(RunError, match=r"optimizer.safetensors: cannot read: .*--resume from the one before"):
        load_updater(saved, trained, 1)
    with pytest.raises(RunError, match=r"trainer_state.json: cannot read"):
        load_state(saved)


# --- with a critic --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["separate", "shared"])
def with_critic(request, tiny_model, tiny_renderer, config):
    """Make an updater with a critic."""

    def make(**changes):
        settings = config("ppo", model=str(tiny_model), critic_backbone=request.param, **changes)
        policy = load_model(tiny_model)
        return Updater(
            policy, ALGORITHMS["ppo"](settings), settings, critic=make_critic(settings, policy, tiny_renderer)
        )

    return make


def test_a_critic_and_its_optimizer_come_back_bit_for_bit(with_critic, tiny_model, tmp_path):
    made, fresh = with_critic(), with_critic()
    made.update([[]], 0, UpdateStats())
    with torch.no_grad():
        for number, (name, parameter) in enumerate(made.named.items()):
            made.optimizer.state[parameter]["exp_avg"].fill_(number)
            if name.startswith("critic."):
                parameter.add_(number)
    save_checkpoint(tmp_path, made, tiny_model, {"step": 1})
    load_updater(tmp_path, fresh, 1)
    assert any(name.startswith("critic.") for name in made.named)
    for name, parameter in made.named.items():
        left, right = made.optimizer.state[parameter], fresh.optimizer.state[fresh.named[name]]
        assert all(torch.equal(left[key], right[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
        assert torch.equal(parameter, fresh.named[name])


def test_while_the_critic_warms_up_the_policy_has_no_optimizer_state(with_critic, tiny_model, tmp_path):
    made, fresh = with_critic(critic_warmup_steps=1), with_critic(critic_warmup_steps=1)
    made.update([[]], 0, UpdateStats())
    save_checkpoint(tmp_path, made, tiny_model, {"step": 1})
    load_updater(tmp_path, fresh, 1)
    assert set(fresh.optimizer.state) == set(fresh.critic_parameters)
    with pytest.raises(RunError, match=r"holds no state of model"):
        load_updater(tmp_path, with_critic(), 1)


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    ("backbone", "lora", "files"),
    [("separate", {}, 7), ("shared", {}, 5), ("separate", {"lora_r": 2}, 9), ("shared", {"lora_r": 2}, 7)],
)
def test_a_resumed_ppo_run_ends_where_an_uninterrupted_one_does(taught_model, tmp_path, backbone, lora, files):
    """Killed in the third step of four, the second being the last that trains the critic alone."""

    def settings(name):
        small = {
            "prompts_per_step": 8,
            "max_completion_length": 4,
            "max_steps": 4,
            "save_steps": 1,
            "save_total_limit": 1,
        }
        return TrainConfig(
            algo="ppo", model=str(taught_model), env="gymtune/Arithmetic-v0", output_dir=str(tmp_path / name),
            critic_backbone=backbone, critic_warmup_steps=2, learning_rate=3e-3, warmup_steps=1, mini_batches=2,
            **small, **lora,
        )  # fmt: skip

    def kill(line):
        if line["step"] == 3:
            raise KilledError

    whole, cut = settings("whole"), settings("cut")
    assert train(whole).name == "ppo_actor"
    with pytest.raises(KilledError):
        train(cut, listeners=Listeners(on_step=kill))
    assert (tmp_path / "cut" / "checkpoints" / "step_000002" / "critic").is_dir()
    steps = []
    train(cut, resume=True, listeners=Listeners(on_step=lambda line: steps.append(line["step"])))
    assert steps == [3, 4]
    names = [
        sorted(str(p.relative_to(tmp_path / run)) for p in (tmp_path / run).rglob("*")) for run in ("whole", "cut")
    ]
    assert names[0] == names[1]
    left, right = (
        [tmp_path / run / name for name in names[0] if name.endswith("safetensors")] for run in ("whole", "cut")
    )
    assert len(left) == files
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(left, right, strict=True))


# --- written aside --------------------------------------------------------------------------------------------------


def half(error):
    def fill(folder):
        (folder / "first").write_text("new")
        raise error

    return fill


@pytest.mark.parametrize(("raised", "seen"), [(OSError("No space left"), RunError), (KeyboardInterrupt(), None)])
def test_a_write_that_stops_half_way_leaves_the_old_whole(tmp_path, raised, seen):
    target = tmp_path / "model"
    write_aside(target, lambda folder: (folder / "first").write_text("old"))
    with pytest.raises(seen or type(raised)):
        write_aside(target, half(raised))
    assert (target / "first").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(seen or type(raised)):
        write_aside(tmp_path / "other", half(raised))
    assert not (tmp_path / "other").exists()


def test_a_last_rename_that_fails_brings_the_old_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    write_aside(target, lambda folder: (folder / "first").write_text("old"))
    plain = os.replace

    def fail(source, target):
        if source.name.endswith(".partial"):
            raise OSError("the disk is gone")
        plain(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunError, match="the disk is gone"):
        write_aside(target, lambda folder: (folder / "first").write_text("new"))
    assert (target / "first").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    for name in (".model.partial", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "junk").write_text("junk")
    write_aside(tmp_path / "model", lambda folder: (folder / "first").write_text("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["first"]


def test_an_old_folder_is_replaced_and_not_merged(tmp_path):
    for name in ("one", "two"):
        write_aside(tmp_path / "model", lambda folder, name=name: (folder / name).write_text("x"))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_refuses_is_named(trained, tiny_model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write: .*make room and go on with --resume"):
        save_pretrained(trained.model, tiny_model, tmp_path / "file" / "model")
