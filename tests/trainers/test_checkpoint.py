"""Checkpoints: what others can open, what a crash leaves, what is refused."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from gymtune.agents.models import CausalAttend, load_model
from gymtune.tools.errors import RunError
from gymtune.trainers.checkpoint import load_optimizer, load_state, save_checkpoint, save_pretrained, write_aside
from gymtune.trainers.loop import ALGORITHMS
from gymtune.trainers.update import Updater, UpdateStats

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
    save_checkpoint(target, trained.model, tiny_model, trained.optimizer, {"step": 1, "tokens_seen": 7})
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
    save_checkpoint(saved, trained.model, tiny_model, trained.optimizer, {})
    load_optimizer(saved, fresh.model, fresh.optimizer)
    for mine, other in zip(fresh.model.parameters(), trained.model.parameters(), strict=True):
        left, right = fresh.optimizer.state[mine], trained.optimizer.state[other]
        assert left.keys() == right.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left)


def test_what_was_loaded_does_not_hang_on_the_file(trained, saved):
    load_optimizer(saved, trained.model, trained.optimizer)
    file = saved / "optimizer.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)  # in place: a mapped tensor would turn into NaN
    assert all(not state["exp_avg"].isnan().any() for state in trained.optimizer.state.values())


def test_an_optimizer_of_another_model_is_refused(trained, saved):
    file = saved / "optimizer.safetensors"
    tensors = load_file(file)
    name = "model.norm.weight"
    save_file(tensors | {f"{name}/exp_avg": torch.zeros(3)}, file)
    with pytest.raises(RunError, match=r"model.norm.weight/exp_avg \(3,\) does not belong to this model"):
        load_optimizer(saved, trained.model, trained.optimizer)
    save_file(tensors | {"other/exp_avg": torch.zeros(3)}, file)
    with pytest.raises(RunError, match="other/exp_avg"):
        load_optimizer(saved, trained.model, trained.optimizer)
    save_file({key: value for key, value in tensors.items() if not key.startswith(name)}, file)
    with pytest.raises(RunError, match=r"holds no state of model.norm.weight \(1 parameters lack it\)"):
        load_optimizer(saved, trained.model, trained.optimizer)


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1'])
def test_broken_files_are_named(trained, saved, content):
    for name in ("optimizer.safetensors", "trainer_state.json"):
        if content is None:
            (saved / name).unlink()
        else:
            (saved / name).write_bytes(content)
    with pytest.raises(RunError, match=r"optimizer.safetensors: cannot read: .*--resume from the one before"):
        load_optimizer(saved, trained.model, trained.optimizer)
    with pytest.raises(RunError, match=r"trainer_state.json: cannot read"):
        load_state(saved)


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
