"""The loop: credit, who is left out, mini-batches and passes, and what a run leaves."""

from pathlib import Path

import pytest
import torch

from gymtune.agents import read_trajectories
from gymtune.envs import make_env
from gymtune.tools.errors import ConfigError, RunError
from gymtune.trainers import Trainer, train
from gymtune.trainers.advantages import group_advantages
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.update_stats import UpdateStats

CLOCK = {"step_time", "time/rollout", "time/eval"}
FP32 = 1e-6


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def untimed(lines):
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


# --- credit ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(episode):
    """Three groups of four: one without a known reward, one with a failure, one whole."""
    made = []
    for group, rewards in {"a": [1, 0, 0, 1], "b": [3, 1, 0, 0], "c": [0, 1, 2, 6]}.items():
        for sample, reward in enumerate(rewards):
            name = f"{group}{sample}"
            made.append(episode((0, [3, 4]), (1, [5, 0]), name=name, group=group, reward=float(reward)))
    for trajectory in made[:4]:
        trajectory.rewards = {"gt": None}
    made[5].error = "Traceback: the env crashed"
    return made


def advantages(experiences):
    """Return the advantage of each episode, which all its tokens have."""
    assert all(len(set(one.advantages)) == 1 for one in experiences)
    return [one.advantages[0] for one in experiences]


def numbered(trajectories):
    return experiences_of(trajectories, [float(i) for i in range(len(trajectories))], need_logprobs=True)


def test_credit_is_the_algorithms_own(trainer, batch):
    wanted = group_advantages([None] * 4 + [3, None, 0, 0] + [0, 1, 2, 6], list("aaaabbbbcccc")).tolist()
    assert advantages(trainer().credit(batch)) == wanted
    assert [a == 0 for a in wanted] == [True] * 4 + [False, True, False, False] + [False] * 4


def test_control_deals_the_known_rewards_out_anew(trainer, batch):
    honest, control = trainer(), trainer(control="shuffle_rewards")
    plain, shuffled = advantages(honest.credit(batch)), advantages(control.credit(batch))
    assert shuffled != plain
    assert shuffled == advantages(control.credit(batch))  # the same for the same step
    control.step = 1
    assert advantages(control.credit(batch)) != shuffled
    assert [shuffled[i] for i in (0, 1, 2, 3, 5)] == [0.0] * 5  # no reward is dealt to those that have none
    raw = trainer(control="shuffle_rewards", scale_rewards="none")
    dealt = advantages(raw.credit(batch))
    assert sum(dealt[4:8]) == pytest.approx(0, abs=FP32)
    assert sum(dealt[8:]) == pytest.approx(0, abs=FP32)
    assert [t.reward for t in batch[8:]] == [0, 1, 2, 6]  # the trajectories keep what they earned


def test_failed_and_broken_episodes_leave_loss_and_baseline(trainer, batch):
    made = trainer()
    experiences = made.credit(batch)
    found = advantages(experiences)
    mean = (3 + 0 + 0) / 3
    std = ((3 - mean) ** 2 + 2 * mean**2) ** 0.5 / 2**0.5
    assert found[4] == pytest.approx((3 - mean) / (std + 1e-4), rel=FP32)
    ((rows,),) = made.batches(experiences)
    kept = [4, 6, 7, 8, 9, 10, 11]
    assert sorted(row.advantages[0] for row in rows) == sorted(found[i] for i in kept)


def test_truncated_episodes_leave_the_loss_and_not_the_baseline(trainer, batch):
    batch[8].truncated = batch[11].truncated = True
    plain, masked = trainer(), trainer(mask_truncated_completions=True)
    experiences = plain.credit(batch)
    found = advantages(experiences)
    assert advantages(masked.credit(batch)) == found
    ((rows,),) = plain.batches(experiences)
    assert len(rows) == 7
    ((rows,),) = masked.batches(experiences)
    assert sorted(row.advantages[0] for row in rows) == sorted(found[i] for i in (4, 6, 7, 9, 10))


def test_everything_truncated_and_masked_is_a_step_of_loss_zero(trainer, batch):
    made = trainer(mask_truncated_completions=True)
    for trajectory in batch:
        trajectory.truncated = True
    ((rows,),) = made.batches(made.credit(batch))
    before, stats = weights(made.model), UpdateStats()
    made.updater.update([rows], 0, stats)
    assert (stats.loss, stats.grad_norm) == (0.0, 0.0)
    assert same(before, made.model.parameters())


# --- mini-batches and passes ----------------------------------------------------------------------------------------


def test_mini_batches_split_a_step_by_groups(trainer, batch):
    for trajectory in batch[:4]:
        trajectory.rewards = {}
    batch[5].error = None
    made = trainer(mini_batches=2, prompts_per_step=2)
    (passes,) = made.batches(numbered(batch[4:]))
    assert [sorted(row.advantages[0] for row in part) for part in passes] in (
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[4, 5, 6, 7], [0, 1, 2, 3]],
    )
    assert [row.trajectory for part in passes for row in part] == [0, 1, 2, 3] * 2  # counted within its own batch


def test_every_pass_reads_everything_in_an_order_of_its_own(trainer, episode):
    many = numbered([episode((0, [3]), (1, [5]), name=f"t{i}", group=f"g{i // 2}") for i in range(16)])
    made = trainer(num_iterations=3, prompts_per_step=8, num_generations=2, mini_batches=4)
    orders = [[row.advantages[0] for part in one for row in part] for one in made.batches(many)]
    assert [len(part) for one in made.batches(many) for part in one] == [4] * 12
    assert all(sorted(order) == [float(i) for i in range(16)] for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [[row.advantages[0] for part in one for row in part] for one in made.batches(many)] == orders


@pytest.mark.parametrize(("options", "steps"), [({}, 1), ({"mini_batches": 4}, 4), ({"num_iterations": 3}, 3)])
def test_optimizer_steps_of_a_rollout_batch(trainer, options, steps):
    made = trainer(max_steps=2, **options)
    taken = []
    plain = made.updater.optimizer.step
    made.updater.optimizer.step = lambda: taken.append(made.step) or plain()
    made.train(Path(made.config.model))
    assert taken == [0] * steps + [1] * steps


def test_a_second_pass_is_off_policy(trainer):
    """Old log-probs stay the sampler's: the ratio is 1 in the first pass only."""

    def ratio(iterations):
        lines = []
        made = trainer(max_steps=1, learning_rate=0.01, num_iterations=iterations, save_trajectories=False)
        made.on_step = lines.append
        made.train(Path(made.config.model))
        return lines[0]["sampling/importance_sampling_ratio/max"]

    assert ratio(1) == pytest.approx(1, abs=1e-4)
    assert ratio(2) > 1.01


# --- sampling -------------------------------------------------------------------------------------------------------


def test_a_step_samples_groups_with_the_current_weights(trainer):
    made = trainer(max_steps=2)
    seen = []
    made.on_episode = seen.append
    made.train(Path(made.config.model))
    assert [len(seen[:16]), len(seen)] == [16, 32]
    assert {turn.policy_version for t in seen[:16] for turn in t.turns} == {0}
    assert {turn.policy_version for t in seen[16:] for turn in t.turns} == {1}
    assert sorted(t.sample for t in seen[:16]) == sorted([0, 1, 2, 3] * 4)
    assert len({t.group_id for t in seen}) == 8
    assert {t.task_index for t in seen[:16]} != {t.task_index for t in seen[16:]}
    assert not {t.seed for t in seen[:16]} & {t.seed for t in seen[16:]}
    for step, part in ((1, seen[:16]), (2, seen[16:])):
        stored = list(read_trajectories(made.run.path / "trajectories" / f"step_{step:06d}.jsonl"))
        assert {t.trajectory_id for t in stored} == {t.trajectory_id for t in part}


def test_one_task_twice_in_a_step_is_two_groups_with_seeds_of_their_own(trainer):
    made = trainer(env_args={"size": 1}, temperature=3.0)  # hot, so that samples of different seeds differ
    episodes, _ = made.collect()
    assert {t.task_index for t in episodes} == {0}
    assert len({t.group_id for t in episodes}) == 4
    assert len({tuple(t.tokens + [round(1e6 * x) for x in t.logprobs if x is not None]) for t in episodes}) > 4


def test_an_env_that_always_fails_stops_the_run_and_leaves_the_reason(trainer):
    def broken():
        env = make_env("gymtune/Arithmetic-v0")
        env.reset = lambda **_: 1 / 0
        return env

    made = trainer(env=broken)
    with pytest.raises(RunError, match="step 1: all 16 episodes failed, the first one with: ZeroDivisionError"):
        made.train(Path(made.config.model))
    (first, *_) = read_trajectories(made.run.path / "trajectories" / "step_000001.jsonl")
    assert "ZeroDivisionError" in (first.error or "")


def test_episodes_that_fail_before_their_first_token_do_not_stop_a_run(trainer):
    def sometimes():
        env = make_env("gymtune/Arithmetic-v0")
        plain = env.reset
        env.reset = lambda **options: plain(**options) if options["options"]["task_index"] % 2 else 1 / 0
        return env

    lines = []
    made = trainer(env=sometimes, max_steps=2, prompts_per_step=8)
    made.on_step = lines.append
    made.train(Path(made.config.model))
    assert all(0 < line["episodes/failed"] < 32 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)


def test_what_an_algorithm_needs_is_named(trainer, config):
    made = trainer()
    for algo, wanted in (("grpo", "an env or a dataset, one of them"), ("sft", "a dataset")):
        with pytest.raises(ConfigError, match=f"algo '{algo}' needs {wanted}, got env None and dataset None"):
            Trainer(config(algo), made.model, made.agent, made.run)
    with pytest.raises(ConfigError, match="algo 'sft' needs a dataset, got env <"):
        Trainer(config("sft"), made.model, made.agent, made.run, env=lambda: make_env("gymtune/Arithmetic-v0"))


def test_levels_rise_over_a_run(trainer):
    """Three levels over the first three quarters, one after the other, then all of them."""
    levels = {}
    curriculum = {"levels": [1, 2, 3], "warmup": 0.75, "size": 50}
    made = trainer(max_steps=4, prompts_per_step=16, num_generations=2, env_args=curriculum, save_trajectories=False)
    made.on_episode = lambda t: levels.setdefault(made.step, set()).add(t.metadata["level"])
    made.train(Path(made.config.model))
    assert levels == {0: {1}, 1: {2}, 2: {3}, 3: {1, 2, 3}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_weights": {"gtt": 1.0}}, r"rewards: no component 'gtt' in this env\. Did you mean 'gt'"),
        ({"max_model_length": 4096}, r"max_model_length 4096 is more than the 512"),
        ({"env": "gymtune/Arithmetik-v0"}, r"Did you mean 'gymtune/Arithmetic-v0'"),
    ],
)
def test_a_config_that_cannot_be_built_leaves_no_folder(settings, changes, message):
    wrong = settings("grpo", **changes)
    with pytest.raises(ConfigError, match=message):
        train(wrong)
    assert not Path(wrong.output_dir).exists()


def test_the_finished_model_has_the_name_of_its_kind(settings, trainer):
    assert train(settings("sft", max_steps=2)).name == "full_sft"
    assert trainer("grpo").prefix == "grpo"
    assert trainer("cispo").prefix == "cispo"
    assert trainer("cispo", env=lambda: make_env("gymtune/Calculator-v0")).prefix == "agent"
    assert trainer("ppo").prefix == "ppo_actor"
    assert trainer("ppo", env=lambda: make_env("gymtune/Calculator-v0")).prefix == "ppo_actor"


def test_a_dry_run_measures_the_first_step_and_changes_nothing(trainer):
    options = {"max_steps": 1, "beta": 0.05, "save_trajectories": False}
    made, real = trainer(**options), trainer(**options)
    before, files = weights(made.model), sorted(made.run.path.iterdir())
    found = made.dry_run()
    assert same(before, made.model.parameters())
    assert not made.updater.optimizer.state
    assert sorted(made.run.path.iterdir()) == files
    lines = []
    real.on_step = lines.append
    real.train(Path(real.config.model))
    (wanted,) = untimed(lines)
    assert found == wanted
    assert not same(before, real.model.parameters())
