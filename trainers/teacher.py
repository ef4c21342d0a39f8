"""The teacher of a run: which folders may teach, and what one says at the tokens of a micro-batch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from ..agents.models import LanguageModel, adapter_off, check_vocabulary
from ..agents.models.inspection import ModelFacts, inspect_model
from ..agents.renderer import Renderer
from ..tools.errors import ConfigError
from .batch import MicroBatch
from .config import TrainConfig
from .fused_divergence import Measure, Teacher, WholeTeacher, top_teacher
from .policy import hidden_states


def measure_of(config: TrainConfig) -> Measure:
    """Return the divergence that a config asks for."""
    return Measure(config.divergence, config.distill_temperature, config.jsd_beta)


@torch.no_grad()
def ask_teacher(
    policy: LanguageModel, batch: MicroBatch, teacher: LanguageModel | None, config: TrainConfig
) -> Teacher:
    """Return a teacher's distributions at the N trainable tokens: all ids, or the `distill_top_k` likeliest.

    None as teacher: the policy as it began, its adapter off.
    """
    model = policy if teacher is None else teacher
    with adapter_off(policy) if teacher is None else nullcontext():
        whole = WholeTeacher(hidden_states(model, batch), model.head_weight)
    if config.distill_top_k is None:
        return whole
    return top_teacher(whole, config.distill_top_k, len(policy.head_weight), config.distill_temperature)


def check_teacher(folder: Path, renderer: Renderer, policy: ModelFacts, config: TrainConfig) -> ModelFacts:
    """Return the facts of a teacher's folder; raise ConfigError unless it can judge what the policy reads or says.

    It has to know every token of the policy by its id, and may know more; and to take sequences as long as a policy
    that acts may see. `renderer` is the policy's. ModelError when the folder is no model, or has no tokenizer.
    """
    facts = inspect_model(folder)
    theirs = Renderer.from_folder(folder, chat_template=renderer.chat_template).tokenizer.get_vocab()
    known = {number: token for token, number in theirs.items()}
    ours = sorted((number, token) for token, number in renderer.tokenizer.get_vocab().items())
    differing = [(number, token) for number, token in ours if known.get(number) != token]
    if differing:
        number, token = differing[0]
        there = repr(known[number]) if number in known else "nothing"
        raise ConfigError(
            f"teacher_model {folder} has another tokenizer than the policy {config.model}: id {number} is {token!r} to "
            f"the policy and {there} to the teacher ({len(differing)} of {len(ours)} ids differ), so its distributions "
            "are over other tokens. Take a teacher with the policy's tokenizer, or a policy with the teacher's"
        )
    check_vocabulary(len(renderer.tokenizer), facts, str(folder))
    if config.env is not None:
        _check_for_acting(facts, policy, config)
    return facts


def _check_for_acting(teacher: ModelFacts, policy: ModelFacts, config: TrainConfig) -> None:
    """Raise ConfigError where a policy may see or say what the teacher does not take."""
    longest = config.max_model_length or policy.context
    if teacher.context < longest:
        raise ConfigError(
            f"teacher_model {config.teacher_model} was made for {teacher.context} tokens, episodes may have {longest}: "
            "set max_model_length, or take another teacher"
        )
    if teacher.vocab_size < policy.vocab_size:
        raise ConfigError(
            f"teacher_model {config.teacher_model} has logits for {teacher.vocab_size} ids, the policy may say "
            f"{policy.vocab_size}: take another teacher"
        )


def vocabulary_note(teacher: ModelFacts, policy: ModelFacts) -> str | None:
    """Return what a reader should know where teacher and policy have logits for unequally many ids."""
    if teacher.vocab_size == policy.vocab_size:
        return None
    if teacher.vocab_size > policy.vocab_size:
        how = f"its logits are cut to the policy's {policy.vocab_size} and normalised anew"
    else:
        how = f"both are compared over these, out of the policy's {policy.vocab_size}"
    return f"the teacher has logits for {teacher.vocab_size} ids: {how}"
