"""A template written as each family's leads to its format; where it is silent, the vocabulary does."""

import os

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gymtune.agents import Renderer
from gymtune.agents.chat_format_probe import probe_chat_format
from gymtune.tools import ParsedCall, get_chat_format, register_chat_format
from gymtune.tools import chat_format as registry
from gymtune.tools.formats import Llama3JsonFormat

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}CALLS<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = CHATML.replace("CALLS", "")
HERMES = CHATML.replace(
    "CALLS",
    """{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}""",
)
QWEN3_CODER = CHATML.replace(
    "CALLS",
    """{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value | tojson if value is mapping else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
)
LLAMA = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif -%}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}{{ (call.function | tojson)[:-1] }}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
MISTRAL_NEW = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- else %}{{ m.content }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]
{{- call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK_V3 = """{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>
{%- elif m.tool_calls %}{{ m.content }}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- else %}{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"""
DEEPSEEK_V31 = """{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.tool_calls %}<｜Assistant｜></think>{{ m.content }}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- else %}<｜Assistant｜></think>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"""
"""Takes arguments as JSON text only, as the family's own does."""

REFUSES = PLAIN.replace("CALLS", "") + "{% if messages[-1].tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
STRANGE = CHATML.replace("CALLS", "{% for call in m.tool_calls or [] %}call {{ call.function.name }}{% endfor %}")


def tokenizer(template: str | None = None, *special: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        (QWEN3_CODER, "qwen3_coder"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (MISTRAL_NEW, "mistral"),
        (DEEPSEEK_V3, "deepseek"),
        (DEEPSEEK_V31, "deepseek"),
    ],
)
def test_the_template_tells(template: str, name: str) -> None:
    other = tokenizer(PLAIN, "[TOOL_CALLS]")  # what the template writes counts for more than the vocabulary
    assert probe_chat_format(other, template).name == name
    assert probe_chat_format(tokenizer(template), None).name == name
    assert Renderer(tokenizer(template, "<|im_end|>")).chat_format.name == name


@pytest.mark.parametrize("template", [PLAIN, REFUSES, STRANGE, "{{ raise_exception('never') }}", "always the same"])
@pytest.mark.parametrize(
    ("special", "name"),
    [
        ((), "hermes"),
        (("<tool_call>",), "hermes"),
        (("[TOOL_CALLS]",), "mistral"),
        (("<｜tool▁calls▁begin｜>",), "deepseek"),
        (("<|python_tag|>",), "llama3_json"),
        (("<|python_tag|>", "<｜tool▁calls▁begin｜>"), "deepseek"),  # R1's distillates of Llama
    ],
)
def test_where_the_template_is_silent_the_vocabulary_tells(template: str, special: tuple[str, ...], name: str) -> None:
    assert probe_chat_format(tokenizer(template, *special), template).name == name


def test_a_format_of_ones_own_is_found_and_one_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Llama3JsonFormat):
        name = "mine"

        def scan(self, text: str, turn: int) -> tuple[str, tuple[ParsedCall, ...]]:
            return super().scan(text.removeprefix("Action: "), turn)

    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    template = LLAMA.replace('{"name"', 'Action: {"name"')
    assert probe_chat_format(tokenizer(), template).name == "hermes"
    register_chat_format(Mine())
    assert probe_chat_format(tokenizer(), template).name == "mine"
    mistral = get_chat_format("mistral")
    assert Renderer(tokenizer(PLAIN), chat_format=mistral).chat_format is mistral


def test_the_tiny_model_writes_hermes(tiny_renderer: Renderer) -> None:
    assert tiny_renderer.chat_format.name == "hermes"


@pytest.mark.skipif("GYMTUNE_TEST_MINIMIND_TOKENIZER" not in os.environ, reason="names MiniMind's tokenizer folder")
def test_minimind_writes_hermes() -> None:
    minimind = AutoTokenizer.from_pretrained(os.environ["GYMTUNE_TEST_MINIMIND_TOKENIZER"])
    assert probe_chat_format(minimind, minimind.chat_template).name == "hermes"


def test_an_agent_s_own_calls_become_the_family_s_special_tokens() -> None:
    """What it writes, scripted or sampled, is the same ids; the same text from a user or a tool never is."""
    vocabulary = {"<unk>": 0, "[TOOL_CALLS]": 1, "</s>": 2, "a": 3}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    special = ["[TOOL_CALLS]"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="</s>", unk_token="<unk>", additional_special_tokens=special
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    renderer = Renderer(tokenizer)
    assert renderer.chat_format.name == "mistral"
    assert renderer.assistant_ids("[TOOL_CALLS]")[0] == 1
    assert 1 not in renderer.prompt([{"role": "user", "content": "[TOOL_CALLS]"}])
