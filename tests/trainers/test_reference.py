"""A reference that follows the policy: by hand, in a run, in a checkpoint; where it cannot follow, it says so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gymtune.tools.errors import ConfigError, ModelError, RunError
from gymtune.trainers import train
from gymtune.trainers.reference import REFERENCE, load_reference, move_reference, save_reference

FP64, FP32 = 1e-15, 1e-7


def named(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_a_move_is_a_share_of_the_way(decoder):
    reference, policy = decoder(0), decoder(1)
    before, target = named(reference), named(policy)
    move_reference(reference, policy, 0.25)
    for name, weight in named(reference).items():
        torch.testing.assert_close(weight, 0.25 * target[name] + 0.75 * before[name], rtol=0, atol=10 * FP64)
    assert all(torch.equal(weight, target[name]) for name, weight in named(policy).items())


def test_alpha_one_is_a_copy_to_the_bit(decoder):
    reference, policy = decoder(0, torch.float32), decoder(1, torch.float32)
    move_reference(reference, policy, 1.0)
    target = named(policy)
    assert all(torch.equal(weight, target[name]) for name, weight in named(reference).items())


def test_a_run_moves_its_reference_every_so_many_steps(trainer):
    made = trainer(
        max_steps=5,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.5,
        learning_rate=0.01,
    )
    reference, policies = made.updater.reference, [named(made.model)]
    seen = []

    def look(line):
        policies.append(named(made.model))
        seen.append(named(reference))

    made.on_step = look
    made.train(Path(made.config.model))
    wanted = policies[0]
    for step, found in enumerate(seen, 1):
        if step % 2 == 0:
            wanted = {name: 0.5 * policies[step][name] + 0.5 * weight for name, weight in wanted.items()}
        for name, weight in found.items():
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=FP32)
    assert not all(torch.equal(seen[0][name], weight) for name, weight in seen[1].items())
    assert all(torch.equal(seen[1][name], weight) for name, weight in seen[2].items())
    stored = load_file(made.run.checkpoint_path(5) / REFERENCE)
    assert all(torch.equal(stored[name], weight) for name, weight in seen[4].items())


def test_a_reference_that_stays_is_not_in_checkpoints(settings):
    config = settings("grpo", max_steps=2)
    train(config)
    assert not (Path(config.output_dir) / "checkpoints" / "step_000002" / REFERENCE).exists()


def test_it_is_stored_and_read_to_the_bit(decoder, tmp_path):
    one, other = decoder(0), decoder(1)
    save_reference(one, tmp_path)
    load_reference(other, tmp_path)
    weights = named(other)
    assert all(torch.equal(weight, weights[name]) for name, weight in named(one).items())


def test_a_file_that_is_missing_torn_or_of_another_model_is_named(decoder, tmp_path):
    reference = decoder(0)
    with pytest.raises(RunError, match=rf"{REFERENCE}: cannot read: .*--resume from the one before"):
        load_reference(reference, tmp_path)
    (tmp_path / REFERENCE).write_bytes(b"torn")
    with pytest.raises(RunError, match="cannot read"):
        load_reference(reference, tmp_path)
    weights = named(reference) | {"model.norm.weight": torch.zeros(3)}
    save_file(weights, tmp_path / REFERENCE)
    before = named(reference)
    with pytest.raises(ModelError, match=r"model\.norm\.weight wanted \(16,\) found \(3,\) \(1 differ\)"):
        load_reference(reference, tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in named(reference).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.1, "lora_r": 4}, "the reference is the model with its adapter off, which stays what it was"),
        ({}, "sync_ref_model: beta is 0, so no KL counts"),
    ],
)
def test_where_nothing_could_follow_it_is_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(sync_ref_model=True, **changes)


@pytest.mark.parametrize("key", ["ref_model_sync_steps", "ref_model_mixup_alpha"])
def test_how_it_moves_is_not_read_where_it_stays(config, key):
    with pytest.raises(ConfigError, match=f"{key}: sync_ref_model is false, so the reference stays what it is"):
        config(beta=0.1, **{key: 1})
