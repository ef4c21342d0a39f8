from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gymtune.agents.models import init_model

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Rechne: é <b>", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": FUNCTION | {"name": "other"}}]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_0_0", "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [call("calculator", {"expression": "2 + 3"})]},
    {"role": "tool", "content": "5", "tool_call_id": "call_0_0", "name": "calculator"},
    {"role": "assistant", "content": "5.", "reasoning_content": "easy"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [call("a", {"x": "é"}), call("b", {})]},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "system", "content": "Stop now."},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("template") / "model"
    init_model(folder, texts=[], hidden_size=8, num_hidden_layers=1, intermediate_size=8)
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_a_whole_chat_by_hand(tokenizer: PreTrainedTokenizerBase) -> None:
    assert render(tokenizer, CHAT, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>"
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
        "<|im_end|>"
        "<|im_start|>tool\n5<|im_end|>"
        "<|im_start|>assistant\n<think>\neasy\n</think>\n5.<|im_end|>"
        "<|im_start|>user\nSure?<|im_end|>"
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "a", "arguments": {"x": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|>'
        "<|im_start|>tool\none<|im_end|><|im_start|>tool\ntwo<|im_end|>"
        "<|im_start|>system\nStop now.<|im_end|>"
        "<|im_start|>assistant\nYes.<|im_end|>"
        "<|im_start|>assistant\n"
    )


def test_tools_are_one_compact_line_each_with_three_keys(tokenizer: PreTrainedTokenizerBase) -> None:
    text = render(tokenizer, CHAT[:1], tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n<tools>\n")
    assert text.endswith("\n</tools><|im_end|>")
    lines = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    shown = {key: FUNCTION[key] for key in ("name", "description", "parameters")}
    assert [json.loads(line) for line in lines] == [shown, shown | {"name": "other"}]
    assert lines[0] == json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def test_tools_without_a_system_message_and_in_bare_form(tokenizer: PreTrainedTokenizerBase) -> None:
    text = render(tokenizer, CHAT[1:2], tools=[{"name": "f"}])
    assert text == (
        '<|im_start|>system\n<tools>\n{"name":"f","description":"","parameters":{}}\n</tools><|im_end|>'
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>"
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_later_messages_only_append(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> None:
    whole = render(tokenizer, CHAT, tools=tools)
    for n in range(1, len(CHAT)):
        part = render(tokenizer, CHAT[:n], tools=tools)
        assert whole.startswith(part)
        prompt = render(tokenizer, CHAT[:n], tools=tools, add_generation_prompt=True)
        assert prompt == part + "<|im_start|>assistant\n"
        if CHAT[n]["role"] == "assistant":
            assert whole.startswith(prompt)  # what the model says goes on where the prompt ends


def test_arguments_that_are_text_stand_as_they_are_and_null_content_is_empty(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [call("f", '{"x":  1}')]}]
    expected = '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n</tool_call><|im_end|>'
    assert render(tokenizer, chat) == expected


def test_calls_without_content_start_the_turn_and_stand_on_lines_of_their_own(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    chat = [{"role": "assistant", "content": "", "tool_calls": [call("f", {}), call("f", {})]}]
    assert render(tokenizer, chat) == f"<|im_start|>assistant\n{one}\n{one}<|im_end|>"
