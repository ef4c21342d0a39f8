"""Texts a tokenizer for an env is trained on: its gold episodes, written by the chat template a new model gets."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from ..envs.registration import make_env
from ..envs.tasks import gold_texts


def tokenizer_texts(env_id: str, n: int = 1000, **env_args: Any) -> Iterator[str]:
    """Yield the first `n` tasks of an env as whole rendered conversations (fewer when it has fewer).

    Rendered, so that role words and the JSON of tools and calls become whole tokens too. A task without a gold
    episode gives its opening messages. Raises ConfigError for an unknown env or argument.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = files(__package__).joinpath("models", "chat_template.jinja").read_text(encoding="utf-8")
    writer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    env = make_env(env_id, **env_args)
    for index in range(min(n, len(env.tasks))):
        _, info = env.reset(options={"task_index": index})
        assert env.task is not None  # reset has begun one
        assert env.episode is not None
        for text in gold_texts(env.task.gold or (), env.chat_format):
            env.step(text)
        yield str(writer.apply_chat_template(env.episode.messages, tools=info["tools"] or None, tokenize=False))
    env.close()
