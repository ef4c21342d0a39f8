"""Equality with MiniMind's distillation: loss and every gradient of a batch, at its settings.

Its formula is written down here from `trainer/train_distillation.py`: over the tokens that are not masked,
`alpha * mean CE + (1 - alpha) * T^2 * sum of KL(teacher || student) / tokens`, the teacher's logits cut. Where
GYMTUNE_TEST_MINIMIND names a checkout, its own `distillation_loss` stands in for the second term.

Where MiniMind means another thing: it multiplies the load-balancing loss of a student with experts by `alpha` too, ours
counts it as every other algorithm does; and its `--temperature` is 1.5 by default, our `distill_temperature` 1.
"""

import ast
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gymtune.agents.models import CausalAttend, ModelConfig
from gymtune.agents.models.init import random_decoder
from gymtune.agents.trajectory import Trajectory
from gymtune.trainers import TrainConfig
from gymtune.trainers.batch import make_rows
from gymtune.trainers.distill import Distill
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP32 = 1e-5  # two float32 ways to the same number
CHECKOUT = os.environ.get("GYMTUNE_TEST_MINIMIND")
SHAPE = {
    "model_type": "qwen3", "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "eos_token_id": 2, "tie_word_embeddings": True, "hidden_size": 32,
}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24}


def model(seed, **changes):
    """Make a decoder whose logits differ from token to token."""
    made = random_decoder(ModelConfig.from_dict(SHAPE | {"vocab_size": 50, "num_hidden_layers": 2} | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * spread if weight.dim() == 1 else 0.3 * spread)
    return made.eval()


def written_down(student_logits, teacher_logits, temperature=1.0):
    """Return MiniMind's divergence of flat logits (N, V), from the formula."""
    p = (teacher_logits / temperature).softmax(-1).detach()
    q = (student_logits / temperature).log_softmax(-1)
    return temperature**2 * (p * (p.log() - q)).sum() / len(p)


def their_own(student_logits, teacher_logits, temperature=1.0):
    """Return what the function of a checkout gives; it alone is taken from the script, which needs all of MiniMind."""
    if not CHECKOUT:
        pytest.skip("GYMTUNE_TEST_MINIMIND names no checkout of MiniMind")
    tree = ast.parse((Path(CHECKOUT) / "trainer/train_distillation.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "distillation_loss"]
    scope = {"torch": torch, "F": F}
    exec(compile(tree, "train_distillation.py", "exec"), scope)
    return scope["distillation_loss"](student_logits, teacher_logits, temperature)


def episodes():
    """Return three episodes of one length, as MiniMind's padded rows are, with masked tokens in and before them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index, mask in enumerate(([0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1])):
        trajectory = Trajectory(
            trajectory_id=f"t{index}", group_id="g", task_id="t", env_id="E-v0", task_index=0, terminated=True
        )
        trajectory.start_segment()
        for token, trained in zip(torch.randint(50, (8,), generator=generator).tolist(), mask, strict=True):
            if trained:
                trajectory.append_turn("said", "stop", [token], [None])
            else:
                trajectory.append_context([token])
        found.append(trajectory)
    return found


@pytest.mark.parametrize("divergence", [written_down, their_own])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("teacher", [{}, {"num_hidden_layers": 3, "vocab_size": 57}, EXPERTS], ids=str)
def test_loss_and_gradient(teacher, alpha, temperature, divergence):
    trajectories, large = episodes(), model(1, **teacher).requires_grad_(False)
    student = model(0)
    config = TrainConfig(
        algo="distill", model="unused", output_dir="unused", data="unused", teacher_model="unused teacher",
        distill_alpha=alpha, distill_temperature=temperature, max_grad_norm=1e9,
    )  # fmt: skip
    updater, stats = Updater(student, Distill(config), config, large), UpdateStats()
    updater.update([make_rows(experiences_of(trajectories, [1.0] * 3, need_logprobs=False))], 0, stats, dry=True)
    ours = [p.grad.clone() for p in student.parameters()]

    ids = torch.tensor([t.tokens for t in trajectories])
    mask = torch.tensor([t.response_mask for t in trajectories])[:, 1:].flatten().bool()
    positions = torch.arange(ids.shape[1])[None]
    logits, said = (m.logits(m(ids, positions, CausalAttend()))[:, :-1].flatten(0, 1) for m in (student, large))
    entropy = F.cross_entropy(logits[mask], ids[:, 1:].flatten()[mask])
    theirs = alpha * entropy + (1 - alpha) * divergence(logits[mask], said[mask][:, :50], temperature)
    assert stats.loss == pytest.approx(theirs.item(), abs=FP32)
    wanted = torch.autograd.grad(theirs, list(student.parameters()))
    torch.testing.assert_close(ours, list(wanted), rtol=FP32, atol=FP32)
    assert max(g.abs().max() for g in wanted) > 0.01
