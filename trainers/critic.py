"""The critic: what the rest of an episode is worth, told from what stands before a token."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..agents.loading import DTYPES, check_device, place_model
from ..agents.models import LanguageModel, check_vocabulary, is_classifier, load_any, load_classifier, save_any
from ..agents.models.folder import copy_tokenizer
from ..agents.models.misfits import copy_weights
from ..agents.renderer import Renderer
from ..tools.errors import ConfigError, RunError
from .batch import MicroBatch
from .config import TrainConfig
from .policy import hidden_states
from .presets import PRESETS

HEAD = "value_head.safetensors"
"""File of the head: one tensor, `weight` (1, E); beside the backbone, or alone where that is the policy's."""


class Critic(nn.Module):
    """A linear head E -> 1 without bias on the hidden states of a backbone of its own, or of the policy.

    The head begins at 0, so all values do, and is float32 (float64 over a float64 model). On the policy's own hidden
    states (`backbone` None) the gradient of the value loss flows into the policy. A backbone of its own is trained
    whole, but for a head for logits that nothing reads; it is a plain copy also where the policy has an adapter. Its
    experts, where it has any, are not balanced.
    """

    def __init__(self, policy: LanguageModel, backbone: LanguageModel | None = None) -> None:
        super().__init__()
        if backbone is not None:
            assert isinstance(backbone, nn.Module)
            for name, parameter in backbone.named_parameters():
                parameter.requires_grad_(not name.startswith("lm_head."))
        self.backbone = backbone
        states = policy.head_weight if backbone is None else backbone.head_weight
        dtype = torch.promote_types(states.dtype, torch.float32)
        self.head = nn.Linear(states.shape[1], 1, bias=False, device=states.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)

    def values(self, batch: MicroBatch, policy: LanguageModel, hidden: Tensor | None = None) -> Tensor:
        """Return (N,): for each trainable token of a micro-batch, the value of all that stands before it.

        A shared critic reads the policy's hidden states (N, E): `hidden`, where they are known already.
        """
        if self.backbone is not None:
            hidden = hidden_states(self.backbone, batch)
        elif hidden is None:
            hidden = hidden_states(policy, batch)
        values: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return values.squeeze(1)

    def save(self, folder: Path, start: Path) -> None:
        """Write the head, and with a backbone of its own a Hugging Face folder with the tokenizer of `start`."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.backbone is not None:
            save_any(self.backbone, folder)
            copy_tokenizer(start, folder)
        save_file({"weight": self.head.weight.detach().cpu().contiguous()}, folder / HEAD)

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote. Raises RunError or ModelError for those of another critic."""
        if self.backbone is not None:
            dtype, device = self.backbone.head_weight.dtype, self.backbone.head_weight.device
            stored = load_any(folder, dtype, device)
            copy_weights(dict(self.backbone.named_parameters()), dict(stored.named_parameters()), folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Take the head of a folder alone. Raises RunError when there is none, or one of another width."""
        try:
            tensors = load_file(folder / HEAD)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder / HEAD}: cannot read: {error}; the critic was not saved whole") from error
        copy_weights({"weight": self.head.weight}, tensors, folder / HEAD)


def make_critic(config: TrainConfig, policy: LanguageModel, renderer: Renderer | None) -> Critic:
    """Return the critic of a config, its backbone that of `critic_model`, or of the policy's folder before any update.

    `renderer` is the policy's. A folder that a critic was saved to brings its head too, and so does a reward model,
    whose scores are the first values. A head that scores is the policy's own. Raises ConfigError as `check_critic` does
    and for a critic made for shorter episodes, ModelError for a folder that is no model.
    """
    if config.critic_backbone == "shared" or "critic_backbone" not in PRESETS[config.algo].reads:
        return Critic(policy)
    assert renderer is not None
    folder = Path(config.critic_model or config.model)
    if config.critic_model is not None:
        check_critic(folder, renderer, config.model)
    backbone, score = _backbone(folder, config)
    check_vocabulary(len(renderer.tokenizer), backbone.config, str(folder))
    longest = config.max_model_length or policy.config.max_position_embeddings
    if backbone.config.max_position_embeddings < longest:
        raise ConfigError(
            f"critic_model {folder} was made for {backbone.config.max_position_embeddings} tokens, episodes may have "
            f"{longest}: set max_model_length, or take another critic"
        )
    if config.gradient_checkpointing:
        backbone.checkpoint_layers()
    critic = Critic(policy, backbone)
    if (folder / HEAD).is_file():
        critic.load_head(folder)
    if score is not None:
        copy_weights({"weight": critic.head.weight}, {"weight": score}, folder)
    return critic


def _backbone(folder: Path, config: TrainConfig) -> tuple[LanguageModel, Tensor | None]:
    """Return the layers of a critic's folder and, of a reward model, the head that scores, (1, E)."""
    if is_classifier(folder):
        check_device(config.device, config.dtype)
        return load_classifier(folder, DTYPES[config.dtype], config.device)
    return place_model(folder, device=config.device, dtype=config.dtype), None


def check_critic(folder: Path, renderer: Renderer, policy: str) -> None:
    """Raise ConfigError unless the tokenizer of the folder `folder` gives every id the meaning that the policy's does.

    `renderer` is the policy's, `policy` its name in the message. ModelError when the folder has no tokenizer.
    """
    theirs = Renderer.from_folder(folder, chat_template=renderer.chat_template).tokenizer.get_vocab()
    ours = renderer.tokenizer.get_vocab()
    differing = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    if differing:
        token, number = differing[0]
        known = [name for name, vocabulary in ((policy, ours), (folder, theirs)) if vocabulary.get(token) == number]
        raise ConfigError(
            f"critic_model {folder} has another vocabulary than the policy {policy}: {len(theirs)} tokens against "
            f"{len(ours)}; id {number} is {token!r} in {known[0]} alone. Take a critic with the policy's tokenizer"
        )
