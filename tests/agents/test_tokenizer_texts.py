"""Texts for a tokenizer: whole gold episodes as the template of a new model writes them."""

from pathlib import Path

import pytest

from gymtune.agents import Renderer, ScriptedAgent, rollout
from gymtune.agents.models import init_model
from gymtune.agents.tokenizer_texts import tokenizer_texts
from gymtune.tools.errors import ConfigError

CALCULATOR = "gymtune/Calculator-v0"


def test_a_text_is_what_the_renderer_of_a_new_model_makes_of_a_gold_episode(tmp_path: Path) -> None:
    texts = list(tokenizer_texts(CALCULATOR, 20))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    init_model(tmp_path / "m", texts=texts, **sizes)
    renderer = Renderer.from_folder(tmp_path / "m")
    played = rollout(CALCULATOR, ScriptedAgent(renderer), 20)
    assert [renderer.tokenizer.decode(t.tokens) for t in played] == texts


@pytest.mark.parametrize("word", ["system", "user", "assistant", "tool", "arguments", "calculator", "expression"])
def test_words_of_the_template_become_one_token(tmp_path: Path, word: str) -> None:
    from gymtune.agents.models.init import train_tokenizer

    tokenizer = train_tokenizer(tokenizer_texts(CALCULATOR, 200), 512)
    assert tokenizer.encode(word).tokens == [word]


def test_no_more_texts_than_tasks_and_a_wrong_argument_is_named() -> None:
    assert len(list(tokenizer_texts(CALCULATOR, 10, size=3))) == 3
    with pytest.raises(ConfigError, match=r"takes no argument 'sizes'\. Did you mean 'size'"):
        next(tokenizer_texts(CALCULATOR, 10, sizes=3))
