"""Equality with TRL 1.16 of dpo, ipo, orpo, kto and simpo: loss, every gradient and metrics, both in float32.

A real trainer of TRL gets the tokens from its own collator, and all behind that is its own. What it calls otherwise,
and where it means another thing:
- DPO's label smoothing (cDPO) is its `aot`, whose sorted batch is the pair itself where the batch is one pair: pair by
  pair, then averaged. Its `sigmoid` ignores the option.
- Without a reference DPO and IPO are its CPO, with the likelihood term off (`cpo_alpha` 0). CPO's rewards of IPO are
  means over tokens, DPO's are sums, as are ours (`metrics` False: not compared).
- SimPO is its CPO with `loss_type` simpo.
- ORPO's likelihood term counts the prompt's tokens too and is a mean over the batch's tokens; ours is of the chosen
  replies, a mean over each and then over them, as the paper has it. Where a prompt is one token and replies are equally
  long nothing differs; else TRL's term is put in the place of ours (`theirs_nll`), computed from the logits here.
- KTO pairs the prompts of a batch with the replies before them.

`pytest -s tests/equality` prints the table.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gymtune.agents import Trajectory
from gymtune.agents.models import load_model
from gymtune.trainers import TrainConfig
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP32 = 1e-5  # loss, entries of the gradient, metrics: two float32 ways to the same number
SHARE = 1e-5  # norm of the difference of a parameter's two gradients, as a share of that of the gradient
DIFFERENT = 1e-2  # two settings of an algorithm are at least so far apart, or one of them would show nothing
LOGGED = ("rewards/", "logps/", "kl", "log_odds_", "entropy")
PAIRS = 4


@dataclass(frozen=True)
class Setting:
    """One comparison: `changes` to the preset, `theirs` options of TRL; see `make_pairs` and `labels`.

    `drift`: how far the policy is from its reference, see `weights`; `swapped`: the two change places.
    """

    algo: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    drift: float = 0.1
    even: bool = False
    tools: bool = False
    labels: str = "mixed"
    metrics: bool = True
    swapped: bool = False

    @property
    def drifts(self) -> tuple[float, float]:
        """Of policy and reference."""
        return (0.0, self.drift) if self.swapped else (self.drift, 0.0)


CPO = {"trainer": "cpo", "cpo_alpha": 0.0}
SMOOTH = {"label_smoothing": 0.2}
FREE = {"reference_free": True}
SETTINGS = [
    Setting("dpo", "preset"),
    Setting("dpo", "beta 0.5", {"beta": 0.5}),
    Setting("dpo", "beta 0.5, tools, micro-batches", {"beta": 0.5, "micro_batch_tokens": 20}, tools=True),
    Setting(
        "dpo", "length_normalized, beta 2", {"length_normalized": True, "beta": 2.0}, {"loss_type": "sigmoid_norm"}
    ),
    Setting("dpo", "label_smoothing 0.2, beta 0.5", SMOOTH | {"beta": 0.5}, SMOOTH | {"loss_type": "aot"}),
    Setting("dpo", "reference_free", FREE, CPO | {"loss_type": "sigmoid"}),
    Setting("dpo", "reference_free, label_smoothing 0.2", FREE | SMOOTH, CPO | SMOOTH | {"loss_type": "sigmoid"}),
    Setting("ipo", "preset", {}, {"loss_type": "ipo"}),
    Setting("ipo", "beta 0.7", {"beta": 0.7}, {"loss_type": "ipo"}),
    Setting("ipo", "tools, micro-batches", {"beta": 0.3, "micro_batch_tokens": 20}, {"loss_type": "ipo"}, tools=True),
    Setting("ipo", "reference_free", FREE, CPO | {"loss_type": "ipo"}, metrics=False),
    Setting("orpo", "preset, replies of one length", even=True),
    Setting("orpo", "preset"),
    Setting("orpo", "beta 1", {"beta": 1.0}),
    Setting("simpo", "preset", {}, CPO | {"loss_type": "simpo"}),
    Setting("simpo", "simpo_gamma 1.5, beta 10", {"beta": 10.0, "simpo_gamma": 1.5}, CPO | {"loss_type": "simpo"}),
    Setting("simpo", "label_smoothing 0.2", SMOOTH, CPO | SMOOTH | {"loss_type": "simpo"}),
    Setting("kto", "preset"),
    Setting("kto", "beta 0.5, a KL of 0", {"beta": 0.5}, drift=0.3, swapped=True),
    Setting("kto", "weights 1.5 and 0.5", {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
    Setting("kto", "micro-batches", {"beta": 0.3, "micro_batch_tokens": 20}),
    Setting("kto", "good ones alone", labels="good"),
    Setting("kto", "bad ones alone", labels="bad"),
]


@dataclass(frozen=True)
class Pair:
    """Ids of a prompt and of two replies; with tools a part of each reply is not the agent's."""

    prompt: list[int]
    replies: tuple[list[int], list[int]]
    masks: tuple[list[int], list[int]]


@dataclass(frozen=True)
class Outcome:
    """What one side computed."""

    loss: float
    gradient: dict[str, Tensor]
    metrics: dict[str, float]


def make_pairs(setting: Setting, vocabulary: int) -> list[Pair]:
    """Return pairs of unequal lengths, one-token replies among them; `even`: all replies of 5, prompts of 1 token."""
    rng = Random(0)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(20, vocabulary) for _ in range(rng.randint(least, most))]

    pairs = []
    for index in range(PAIRS):
        prompt = ids(1, 1) if setting.even else ids(1, 7)
        replies = [ids(5, 5) if setting.even else ids(3, 9) for _ in range(2)]
        if index == 1 and not setting.even and not setting.tools:
            replies[0] = ids(1, 1)
        masks = [[int(not (setting.tools and 0 < t < len(reply) - 1)) for t in range(len(reply))] for reply in replies]
        pairs.append(Pair(prompt, (replies[0], replies[1]), (masks[0], masks[1])))
    return pairs


def labels(setting: Setting) -> list[bool]:
    """Return which of a KTO batch is good: every other reply, or all, or none."""
    return [setting.labels == "good" or (setting.labels == "mixed" and i % 2 == 0) for i in range(2 * PAIRS)]


def gradient_of(model: Any) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def give(model: Any, values: Mapping[str, Tensor]) -> Any:
    """Write weights into a model, ours or that of transformers: parameters have the same names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


# --- ours -----------------------------------------------------------------------------------------------------------


def ours(folder: Path, weights: Callable[..., Any], setting: Setting, pairs: list[Pair]) -> Outcome:
    """Run a setting as `Trainer` does: experiences, annotate, credit, rows, gradient."""
    config = TrainConfig(algo=setting.algo, model="unused", output_dir="unused", data="unused", **setting.changes)
    policy, start = map(weights, setting.drifts)
    model, algorithm = give(load_model(folder), policy), ALGORITHMS[setting.algo](config)
    reference = None if algorithm.reference_model(config) is None else give(load_model(folder), start)
    updater = Updater(model, algorithm, config, reference)
    trajectories = [
        _trajectory(pair.prompt, reply, mask)
        for pair in pairs
        for reply, mask in zip(pair.replies, pair.masks, strict=True)
    ]
    for trajectory, good in zip(trajectories, labels(setting), strict=True):
        trajectory.success = good
    experiences = experiences_of(trajectories, need_logprobs=False)
    updater.annotate(experiences)
    algorithm.credit(experiences)
    stats = UpdateStats()
    loss = updater._gradient(make_rows(experiences), stats, warming=False)
    return Outcome(loss, gradient_of(model), stats.metrics())


def _trajectory(prompt: list[int], reply: list[int], mask: list[int]) -> Trajectory:
    trajectory = Trajectory(trajectory_id="t", group_id="g", task_id="t", env_id="E-v0", task_index=0)
    trajectory.start_segment()
    trajectory.append_context(prompt)
    for token, said in zip(reply, mask, strict=True):
        if said:
            trajectory.append_turn("said", "stop", [token], [None])
        else:
            trajectory.append_context([token])
    return trajectory


# --- TRL's ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_of(trl: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Make a real trainer of TRL; the data it is given is not what it learns here."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    disable_progress_bars()
    kinds = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "cpo": (CPOTrainer, CPOConfig),
    }
    paired = {"prompt": ["What is 1 + 2?"] * 2, "chosen": ["3"] * 2, "rejected": ["4"] * 2}
    single = {"prompt": ["What is 1 + 2?"] * 2, "completion": ["3", "4"], "label": [True, False]}
    scratch = tmp_path_factory.mktemp("trl")

    def load(values: Mapping[str, Tensor]) -> Any:
        return give(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), values)

    def make(kind: str, policy: Mapping[str, Tensor], reference: Mapping[str, Tensor], **options: Any) -> Any:
        trainer, config = kinds[kind]
        keys = {"output_dir": str(scratch), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
        keys |= {"per_device_train_batch_size": 2, "gradient_checkpointing": False}
        made = trainer(
            model=load(policy),
            args=config(**keys, **options),
            train_dataset=Dataset.from_dict(single if kind == "kto" else paired),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            **({"ref_model": load(reference)} if kind in ("dpo", "kto") else {}),
        )
        made.model.train()
        return made

    return make


def theirs(trainer_of: Callable[..., Any], weights: Callable[..., Any], setting: Setting, pairs: list[Pair]) -> Outcome:
    """Run a setting through TRL's trainer, from its collator on."""
    options = dict(setting.theirs)
    kind = options.pop("trainer", {"ipo": "dpo"}.get(setting.algo, setting.algo))
    config = TrainConfig(algo=setting.algo, model="unused", output_dir="unused", data="unused", **setting.changes)
    options |= {"beta": config.beta}
    options |= {"simpo_gamma": config.simpo_gamma} if setting.algo == "simpo" else {}
    if kind == "kto":
        options |= {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
    trainer = trainer_of(kind, *map(weights, setting.drifts), **options)
    batches = [[pair] for pair in pairs] if options.get("loss_type") == "aot" else [pairs]
    total, metrics = 0.0, {}
    for batch in batches:
        loss, found = _loss(trainer, kind, setting, batch)
        (loss / len(batches)).backward()
        total += float(loss.detach()) / len(batches)
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value / len(batches)
    return Outcome(total, gradient_of(trainer.model), metrics)


def _loss(trainer: Any, kind: str, setting: Setting, pairs: list[Pair]) -> tuple[Tensor, dict[str, float]]:
    if kind in ("cpo", "orpo"):
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, trainer.data_collator(list(map(_row, pairs))))
        if kind == "orpo" and not setting.even:
            loss = loss - theirs_nll(trainer.model, pairs) + ours_nll(trainer.model, pairs)
        return loss, metrics
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows: list[dict[str, Any]] = [dict(zip(keys, (pair.prompt, *pair.replies), strict=True)) for pair in pairs]
    if kind == "kto":
        prompts = [pair.prompt for pair in pairs for _ in range(2)]
        replies = [reply for pair in pairs for reply in pair.replies]
        columns = (prompts, replies, replies[-1:] + replies[:-1], labels(setting))
        names = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    inputs = trainer.data_collator(rows)
    if kind == "dpo":
        masks = [(pair.prompt, mask) for side in range(2) for pair in pairs for mask in [pair.masks[side]]]
        for row, (prompt, mask) in zip(inputs["completion_mask"], masks, strict=True):
            row[len(prompt) : len(prompt) + len(mask)] = torch.tensor(mask)
    loss = trainer._compute_loss(trainer.model, inputs, False)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss, metrics


def _row(pair: Pair) -> dict[str, list[int]]:
    row = {"prompt_input_ids": pair.prompt, "prompt_attention_mask": [1] * len(pair.prompt)}
    for side, reply in zip(("chosen", "rejected"), pair.replies, strict=True):
        ids = pair.prompt + reply
        row |= {f"{side}_input_ids": ids, f"{side}_attention_mask": [1] * len(ids)}
        row[f"{side}_labels"] = [-100] * len(pair.prompt) + reply
    return row


def theirs_nll(model: Any, pairs: list[Pair]) -> Tensor:
    """Return the mean over all tokens of the chosen conversations but the first of each, as TRL's ORPO has it."""
    losses = [_nll(model, pair) for pair in pairs]
    return torch.cat(losses).mean()


def ours_nll(model: Any, pairs: list[Pair]) -> Tensor:
    """Return the mean over the chosen replies of the mean over their tokens."""
    return torch.stack([_nll(model, pair)[len(pair.prompt) - 1 :].mean() for pair in pairs]).mean()


def _nll(model: Any, pair: Pair) -> Tensor:
    ids = torch.tensor([pair.prompt + pair.replies[0]])
    return cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")


# --- together -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(
    trainer_of: Callable[..., Any], tiny_model: Path, weights: Callable[..., Any]
) -> Callable[[Setting], tuple[Outcome, Outcome]]:
    """Run a setting on both sides, once."""
    known: dict[str, tuple[Outcome, Outcome]] = {}
    vocabulary = load_model(tiny_model).config.vocab_size

    def of(setting: Setting) -> tuple[Outcome, Outcome]:
        key = f"{setting.algo} {setting.name}"
        if key not in known:
            pairs = make_pairs(setting, vocabulary)
            mine = ours(tiny_model, weights, setting, pairs)
            with warnings.catch_warnings(action="ignore"):  # TRL calls what transformers will drop
                known[key] = mine, theirs(trainer_of, weights, setting, pairs)
        return known[key]

    return of


@pytest.fixture(scope="module")
def table() -> Iterator[Callable[..., None]]:
    """Take in rows of a table and print it in the end."""
    head = ("algorithm", "setting", "loss", "gradient, largest", "gradient, share of worst parameter")
    rows = [" | ".join(head), " | ".join(["---"] * len(head))]

    def add(setting: Setting, *differences: float) -> None:
        rows.append(" | ".join([setting.algo, setting.name, *(f"{value:.1e}" for value in differences)]))

    yield add
    print("\n\nDifferences from TRL 1.16, float32:\n" + "\n".join(f"| {row} |" for row in rows))


def share(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference as a share of their norm."""
    return float((ours - theirs).norm() / theirs.norm())


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.algo}: {setting.name}")
def test_equal(setting: Setting, outcomes: Callable[[Setting], Any], table: Callable[..., None]) -> None:
    ours, theirs = outcomes(setting)
    assert ours.gradient.keys() == theirs.gradient.keys()
    off_loss = abs(ours.loss - theirs.loss)
    off_largest = float((flat(ours.gradient) - flat(theirs.gradient)).abs().max())
    off_share = max(share(ours.gradient[name], theirs.gradient[name]) for name in theirs.gradient)
    table(setting, off_loss, off_largest, off_share)
    assert off_loss < FP32
    assert off_largest < FP32
    assert off_share < SHARE


MEASURED = [setting for setting in SETTINGS if setting.metrics]


@pytest.mark.parametrize("setting", MEASURED, ids=lambda setting: f"{setting.algo}: {setting.name}")
def test_metrics_are_theirs(setting: Setting, outcomes: Callable[[Setting], Any]) -> None:
    ours, theirs = outcomes(setting)
    names = [name for name in ours.metrics.keys() & theirs.metrics.keys() if name.startswith(LOGGED)]
    assert "rewards/margins" in names or setting.labels != "mixed"
    assert {name for name in theirs.metrics if name.startswith(LOGGED)} == set(names)
    if setting.theirs.get("loss_type") == "aot":
        names.remove("entropy")  # a mean over pairs of means over tokens, where TRL is handed one pair at a time
    for name in names:
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], abs=FP32, rel=FP32), name


def test_the_settings_of_kto_have_a_kl_and_have_none(outcomes: Callable[[Setting], Any]) -> None:
    kl = {s.name: outcomes(s)[0].metrics["kl"] for s in SETTINGS if s.algo == "kto"}
    assert kl["preset"] > DIFFERENT
    assert kl["beta 0.5, a KL of 0"] == 0


@pytest.mark.parametrize("algo", sorted({setting.algo for setting in SETTINGS}))
def test_every_setting_is_another_gradient(algo: str, outcomes: Callable[[Setting], Any]) -> None:
    gradients = {s.name: flat(outcomes(s)[0].gradient) for s in SETTINGS if s.algo == algo}
    for first, second in combinations(gradients, 2):
        assert share(gradients[first], gradients[second]) > DIFFERENT, (first, second)
