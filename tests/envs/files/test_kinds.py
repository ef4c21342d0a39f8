"""Kinds: what each is told by, and that what a file says arrives in the record, in whatever form it was written."""

import json
import os
from pathlib import Path

import pytest

from gymtune.envs.files import (
    KINDS,
    FileTasks,
    Record,
    Row,
    detect,
    detect_file,
    example_path,
    parse_record,
    read_records,
)
from gymtune.envs.files.answers import boxed, number_text
from gymtune.envs.files.remarks import remarks
from gymtune.tools import ConfigError, DataError, ParsedCall, Tool
from gymtune.tools.library.everyday import everyday_toolbox

EXAMPLES = {kind: kind for kind in KINDS if kind != "trajectories"} | {"sharegpt": "sft"}
GSM8K = os.environ.get("GYMTUNE_TEST_GSM8K")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def read(value: dict, kind: str) -> Record:
    record = parse_record(Row(1, value), kind)
    assert isinstance(record, Record), record
    return record


def faults(value: dict, kind: str) -> list[tuple[str, str]]:
    found = parse_record(Row(1, value), kind)
    assert isinstance(found, list), found
    return [(fault.path, fault.rule) for fault in found]


# -- detection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"chosen": "a", "rejected": "b"}, "preference"),
        ({"prompt": "q", "chosen": [], "rejected": [], "messages": []}, "preference"),
        ({"prompt": "q"}, "prompts"),
        ({"conversations": [user("q"), assistant("")]}, "prompts"),
        ({"conversations": [user("q"), assistant("\u65e0")]}, "prompts"),
        ({"conversations": [user("q"), assistant("a")]}, "sft"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sft"),
        ({"messages": [user("q"), assistant("", tool_calls=[{}])]}, "sft"),
        ({"prompt": "q", "completion": "a"}, "sft"),
        ({"prompt": "q", "completion": "a", "label": True}, "unpaired"),
        ({"messages": [user("q"), assistant("a")], "label": False}, "unpaired"),
        ({"conversations": [user("q"), assistant("")], "gt": ["5"]}, "agentic"),
        ({"conversations": [user("q"), assistant("")], "gt": "5"}, "agentic"),
        ({"messages": [user("q")], "gt": "5"}, "verifiable"),
        ({"question": "q", "answer": "5"}, "verifiable"),
        ({"prompt": "q", "gold": 5.0}, "verifiable"),
        ({"problem": "q", "solution": "5"}, "verifiable"),
        ({"prompt": [user("q")], "reward_model": {"ground_truth": "5"}}, "verifiable"),
        ({"id": "1", "question": [[user("q")]], "function": []}, "bfcl"),
        ({"trajectory_id": "t", "messages": [], "gt": "5"}, "trajectories"),
        ({"chosen": "a", "rejected": None}, None),
        ({"text": "pretraining"}, None),
        ({"conversations": "no list"}, "prompts"),
    ],
)
def test_a_kind_is_told_by_keys(value: dict, kind: str | None) -> None:
    assert detect(value) == kind


def test_a_mix_of_kinds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mix.jsonl"
    path.write_text('{"prompt": "q"}\n\n{"chosen": "a", "rejected": "b"}\n')
    with pytest.raises(DataError, match=r"mix.jsonl, line 3: a record of the kind preference, but line 1 is prompts"):
        detect_file(path)
    path.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"cannot tell the kind .* keys text\. Name it: one of preference"):
        detect_file(path)
    path.write_text("")
    with pytest.raises(DataError, match="no record that can be read"):
        detect_file(path)
    with pytest.raises(ConfigError, match=r"'preferences'\. Did you mean 'preference'"):
        next(read_records(path, "preferences"))


# -- the examples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_read_whole(name: str) -> None:
    """Each text of the file stands in its record once more; nothing is lost on the way."""
    path = example_path(name)
    assert detect_file(path) == EXAMPLES[name]
    records = list(read_records(path))
    assert len(records) == 10 == len(FileTasks(path))
    for record, line in zip(records, path.read_text(encoding="utf-8").splitlines(), strict=True):
        said = json.dumps([record.prompt, *(reply.messages for reply in record.replies)], ensure_ascii=False)
        for text in texts(json.loads(line)):
            assert json.dumps(text, ensure_ascii=False).strip('"') in said
        for schema in record.tools:
            function = schema["function"]
            Tool(function["name"], function["description"], function["parameters"], print)


def texts(value) -> list[str]:
    if isinstance(value, dict):
        own = [value[key] for key in ("content", "value", "completion") if isinstance(value.get(key), str)]
        own = [] if value.get("from") == "function_call" else own
        return own + [text for key, part in value.items() if key != "tools" for text in texts(part)]
    return [text for part in value for text in texts(part)] if isinstance(value, list) else []


def test_the_agentic_gts_are_what_the_tools_give() -> None:
    """The calls of the gold on file, run: each gt stands in a result, and in the answer."""
    toolbox = everyday_toolbox()
    for record in read_records(example_path("agentic")):
        gold = record.reply("reference")
        calls = [call["function"] for message in gold for call in message.get("tool_calls", [])]
        assert {call["name"] for call in calls} <= {tool["function"]["name"] for tool in record.tools}
        parsed = [ParsedCall(str(i), call["name"], call["arguments"], None, "") for i, call in enumerate(calls)]
        results = " ".join(result.content for result in toolbox.call_all(parsed))
        assert [gt for gt in record.gt if gt not in results or gt not in gold[-1]["content"]] == []


# -- conversations -----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TALK = [
    user("q"),
    assistant("", tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "c", "content": "5"},
    assistant("a"),
]


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [{"function": {"name": "f", "arguments": '{"x": 1}'}, "id": "c"}],
        [{"name": "f", "arguments": {"x": 1}, "id": "c"}],
        json.dumps([{"name": "f", "arguments": '{"x": 1}', "id": "c"}]),
    ],
)
@pytest.mark.parametrize(
    "tools", [[SCHEMA], json.dumps([SCHEMA]), [SCHEMA["function"]], json.dumps([SCHEMA["function"]])]
)
@pytest.mark.parametrize("place", ["beside", "system"])
def test_calls_and_tools_of_any_form_become_one(calls, tools, place: str) -> None:
    messages = [user("q"), assistant("", tool_calls=calls, reasoning_content="r"), *TALK[2:]]
    if place == "beside":
        record = read({"messages": messages, "tools": tools}, "sft")
    else:
        record = read({"conversations": [{"role": "system", "content": "s", "tools": tools}, *messages]}, "sft")
        assert record.prompt[0] == {"role": "system", "content": "s"}
    assert record.tools == (SCHEMA,)
    assert record.prompt[-1] == user("q")
    assert record.reply("reference") == (assistant("", tool_calls=[CALL], reasoning_content="r"), *TALK[2:])


def test_sharegpt_is_the_same_conversation() -> None:
    """LLaMA-Factory's tool form: ids are missing there, so a call gets the one that a rollout would give it."""
    shared = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": json.dumps([SCHEMA["function"]]),
        "system": "s",
    }
    record = read(shared, "sft")
    call = {**CALL, "id": "call_0_0"}
    assert record.prompt == ({"role": "system", "content": "s"}, user("q"))
    assert record.reply("reference") == (
        assistant("", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "call_0_0", "content": "5"},
        assistant("a"),
    )
    assert (record.tools, dict(record.metadata)) == ((SCHEMA,), {})


def test_results_without_ids_answer_the_calls_in_order() -> None:
    calls = [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2", "name": "f"}]
    talk = [
        user("q"),
        assistant("", tool_calls=calls),
        *results,
        assistant("a"),
        user("r"),
        assistant("", tool_calls=calls),
    ]
    reply = read({"messages": [*talk, *results, assistant("b")]}, "sft").reply("reference")
    ids = [m["tool_call_id"] for m in reply if m["role"] == "tool"]
    assert ids == ["call_0_0", "call_0_1", "call_2_0", "call_2_1"]
    assert ids == [call["id"] for m in reply for call in m.get("tool_calls", [])]
    assert faults({"messages": [*talk, *results, {"role": "tool", "content": "3"}]}, "sft") == [
        ("messages[9]", "roles")
    ]


def test_null_is_as_good_as_missing() -> None:
    """As Arrow exports JSONL."""
    empty = {"tools": None, "tool_calls": None, "tool_call_id": None, "reasoning_content": None, "name": None}
    record = read({"messages": [{**user("q"), **empty}, {**assistant("a"), **empty}], "gt": None, "x": None}, "sft")
    assert record.prompt == (user("q"),)
    assert record.reply("reference") == (assistant("a"),)
    assert dict(record.metadata) == {}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert read({"messages": [user("q"), called]}, "sft").reply("reference") == (assistant("", tool_calls=[CALL]),)


def test_bfcls_dialect_is_mended_and_names_keep_their_dots() -> None:
    function = {
        "name": "a.b",
        "description": "d",
        "parameters": {
            "type": "dict",
            "properties": {
                "type": {"type": "float", "optional": True},
                "optional": {"type": "tuple", "items": {"type": "dict", "properties": {"x": {"type": "any"}}}},
                "n": {"type": "integer", "enum": [1, 2], "default": 1},
            },
            "required": ["type"],
        },
    }
    record = read({"id": "7", "question": [[user("q")]], "function": [function], "ground_truth": [{"a.b": {}}]}, "bfcl")
    wanted = {
        "type": "object",
        "properties": {
            "type": {"type": "number"},
            "optional": {"type": "array", "items": {"type": "object", "properties": {"x": {}}}},
            "n": {"type": "integer", "enum": [1, 2], "default": 1},
        },
        "required": ["type"],
    }
    assert [tool["function"] for tool in record.tools] == [{**function, "parameters": wanted}]
    assert (record.prompt, record.gt, dict(record.metadata)) == ((user("q"),), [{"a.b": {}}], {"id": "7"})
    assert faults({"messages": [user("q"), assistant("a")], "tools": [function]}, "sft") == [
        ("tools[0].parameters", "tools")  # the dialect is mended for this kind alone
    ]


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair",
    [
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
        {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": "b"},
        {"prompt": [user("q")], "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a", "rejected": " b"},
        {"chosen": "q a", "rejected": "q b"},
    ],
)
def test_pairs_of_any_form_become_one(pair: dict) -> None:
    record = read(pair, "preference")
    assert record.prompt == (user("q"),)
    replies = {reply.label: [m["content"].strip() for m in reply.messages] for reply in record.replies}
    assert replies == {"chosen": ["a"], "rejected": ["b"]}


def test_the_reply_begins_where_the_conversations_part() -> None:
    start = [user("q"), assistant("x"), user("r")]
    record = read(
        {"chosen": [*start, assistant("a"), user("s"), assistant("t")], "rejected": [*start, assistant("b")]},
        "preference",
    )
    assert record.prompt == tuple(start)
    assert [len(reply.messages) for reply in record.replies] == [3, 1]
    same = read({"chosen": [*start, assistant("a")], "rejected": [*start, assistant("a")]}, "preference")
    assert same.prompt == tuple(start)
    assert same.reply("chosen") == same.reply("rejected") == (assistant("a"),)
    open_end = {"chosen": [*start, assistant("a"), user("s")], "rejected": [*start, assistant("a"), user("s")]}
    part = read(open_end, "preference")
    assert [len(reply.messages) for reply in part.replies] == [2, 2]


def test_prompts_that_differ_are_refused() -> None:
    other = [user("q"), assistant("x"), user("r!"), assistant("b")]
    pair = {"chosen": [user("q"), assistant("x"), user("r"), assistant("a")], "rejected": other}
    assert faults(pair, "preference") == [("rejected[2]", "prompts differ")]
    pair = {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("b")]}
    assert faults(pair, "preference") == [("rejected[0]", "prompts differ")]
    assert faults({"chosen": "a", "rejected": "b"}, "preference") == [("", "prompts differ")]


def test_a_pair_without_answers_takes_none_from_its_prompt() -> None:
    prompt = [user("q"), assistant("x"), user("r")]
    assert faults({"prompt": prompt, "chosen": [], "rejected": []}, "preference") == [("rejected", "roles")]


def test_a_system_column_stands_before_the_prompt() -> None:
    pair = {"system": "s", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}
    for value in (pair, {"system": "s", "question": "q", "chosen": "a", "rejected": "b"}):
        record = read(value, "preference")
        assert record.prompt == ({"role": "system", "content": "s"}, user("q"))
        assert record.reply("chosen") == (assistant("a"),)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "q", "completion": "a", "label": False},
        {"prompt": [user("q")], "completion": [assistant("a")], "label": False},
        {"messages": [user("q"), assistant("a")], "label": False},
    ],
)
def test_unpaired_answers(value: dict) -> None:
    record = read(value, "unpaired")
    assert record.prompt == (user("q"),)
    assert record.reply("bad") == (assistant("a"),)
    assert read({**value, "label": True}, "unpaired").reply("good") == (assistant("a"),)


# -- prompts, gt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [[], [assistant("")], [assistant("\u65e0")], [{"role": "assistant", "content": None}]])
def test_the_empty_last_answer_is_dropped(last: list) -> None:
    talk = [user("q"), assistant("x"), user("r")]
    for value, kind in (
        ({"conversations": talk + last}, "prompts"),
        ({"conversations": talk + last, "gt": ["5"]}, "agentic"),
    ):
        record = read(value, kind)
        assert record.prompt == tuple(talk)
        assert record.replies == ()


def test_an_answer_on_file_is_kept_beside_the_prompt() -> None:
    record = read({"conversations": [user("p"), assistant("x"), *TALK], "tools": [SCHEMA], "gt": ["a"]}, "agentic")
    assert record.prompt == (user("p"), assistant("x"), user("q"))
    assert record.reply("reference") == tuple(TALK[1:])
    # MiniMind's trainer goes on from here: the calls so far belong to the prompt
    unanswered = read({"conversations": [*TALK[:3], assistant("")], "gt": ["a"]}, "agentic")
    assert unanswered.prompt == tuple(TALK[:3])


def test_gold_beside_an_agentic_record_is_its_reference() -> None:
    call = {"name": "f", "arguments": {}}
    gold = [assistant("", tool_calls=[call]), assistant("", tool_calls=[call]), assistant("a")]
    record = read(
        {"conversations": [user("q"), assistant("")], "gt": ["a"], "tools": [SCHEMA], "gold": gold}, "agentic"
    )
    reply = record.reply("reference")
    assert [call["id"] for message in reply for call in message.get("tool_calls", [])] == ["call_0_0", "call_1_0"]
    assert (reply[-1], dict(record.metadata), list(remarks(record))) == (assistant("a"), {}, [])
    odd = {"conversations": [user("q")], "gt": ["a"], "gold": [assistant(" ")]}
    assert faults(odd, "agentic") == [("gold[0]", "empty answer")]


@pytest.mark.parametrize(
    ("value", "gt", "worked"),
    [
        ({"answer": "6 * 2 = <<6*2=12>>12\n#### 12"}, "12", "6 * 2 = <<6*2=12>>12\n#### 12"),
        ({"answer": "#### 1,234"}, "1234", "#### 1,234"),
        ({"answer": "#### -5 "}, "-5", "#### -5 "),
        ({"answer": "Paris"}, "Paris", None),
        ({"gold": 59.0}, "59", None),
        ({"gold": 0.5}, "0.5", None),
        ({"gt": 7}, "7", None),
        ({"gt": {"a": 1}}, {"a": 1}, None),
        ({"reward_model": {"style": "rule", "ground_truth": "8"}}, "8", None),
        ({"reward_spec": {"ground_truth": 8}}, "8", None),
        ({"solution": r"So \boxed{\frac{1}{2}}."}, r"\frac{1}{2}", r"So \boxed{\frac{1}{2}}."),
        ({"answer": "9", "solution": "3 * 3 = 9"}, "9", "3 * 3 = 9"),
    ],
)
@pytest.mark.parametrize("prompt", [{"question": "q"}, {"prompt": "q"}, {"problem": "q"}, {"messages": [user("q")]}])
def test_verifiable_answers(value: dict, gt, worked: str | None, prompt: dict) -> None:
    record = read({**prompt, **value}, "verifiable")
    assert record.prompt == (user("q"),)
    assert record.gt == gt
    assert record.reply("reference") == (None if worked is None else (assistant(worked),))


@pytest.mark.parametrize(
    "value", [{"gt": ""}, {"gt": []}, {"answer": "#### "}, {"gold": None}, {"reward_model": {}}, {}]
)
def test_a_missing_or_empty_gt_is_told(value: dict) -> None:
    assert [rule for _, rule in faults({"question": "q", **value}, "verifiable")] == ["gt"]


def test_an_agentic_gt_is_a_list_of_texts_numbers_or_calls() -> None:
    value = {"conversations": [user("q"), assistant("")]}
    gt = ["a", 5, 0.5, {"name": "f", "arguments": {}}]
    assert read({**value, "gt": gt}, "agentic").gt == gt
    assert read({**value, "gt": []}, "agentic").gt == []
    odd = faults({**value, "gt": ["a", " ", None, True, ["a"]]}, "agentic")
    assert odd == [(f"gt[{index}]", "gt") for index in (1, 2, 3, 4)]
    assert faults(value, "agentic") == faults({**value, "gt": None}, "agentic") == [("gt", "gt")]


def test_numbers_and_boxes() -> None:
    assert [number_text(n) for n in (59.0, -0.0, 1e15, 1e300, 0.1)] == ["59", "0", "1000000000000000", "1e+300", "0.1"]
    assert boxed(r"\boxed{1} \boxed{2\text{ {m}}}") == r"2\text{ {m}}"
    assert boxed(r"\boxed{1") is None


def test_all_that_is_wrong_with_a_record_is_told() -> None:
    value = {"prompt": 7, "completion": [{"role": "user"}], "label": 1, "tools": "x"}
    assert faults(value, "unpaired") == [
        ("label", "shape"),
        ("prompt", "shape"),
        ("tools", "tools"),
        ("completion[0].content", "shape"),
    ]


# -- hostile records ---------------------------------------------------------------------------------------------------


MIXED = [item for number in range(4_000) for item in (number, str(number))]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"messages": [{"role": "tool", "content": "x"}] * 20_000}, "sft"),
        ({"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": {}}] * 20_000)]}, "sft"),
        ({"messages": [{"role": "bot"}] * 50_000}, "sft"),
        ({"messages": [user("q"), assistant("a")], "tools": [{"name": "f"}] * 20_000}, "sft"),
        ({"chosen": "\n\nHuman:" * 90_000, "rejected": "\n\nHuman:" * 90_000}, "preference"),
        ({"chosen": "a " * 500_000, "rejected": "a " * 500_000}, "preference"),
        ({"question": "q", "answer": r"\boxed{" * 140_000}, "verifiable"),
        ({"question": "q", "answer": "####" * 250_000}, "verifiable"),
        ({"question": "q", "answer": "#### " + "1," * 500_000}, "verifiable"),
        ({"messages": [user("q"), assistant("a")], "tools": "[" * 900_000}, "sft"),
        ({"messages": [user("q"), assistant("a")], "tools": '[{"a":' * 150_000}, "sft"),
        (
            {
                "messages": [user("q"), assistant("a")],
                "tools": [
                    {
                        "name": "f",
                        "parameters": {"type": "object", "properties": {"x": {"type": MIXED}}},
                    }
                ],
            },
            "sft",
        ),
    ],
)
def test_a_megabyte_of_junk_is_read(value: dict, kind: str) -> None:
    """In linear time: a quadratic search would take minutes."""
    parse_record(Row(1, value), kind)


def test_a_schema_as_deep_as_json_may_be_is_no_crash() -> None:
    schema: dict = {"type": "string", "minLength": 1}
    for _ in range(45):
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"name": "f", "parameters": schema}
    found = parse_record(Row(1, {"messages": [user("q"), assistant("a")], "tools": [tool]}, "sft"), "sft")
    assert isinstance(found, Record) or found[0].came == "not a JSON Schema: nested more than 64 levels deep"


# -- real files --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(GSM8K is None, reason="GYMTUNE_TEST_GSM8K names no folder with GSM8K's files")
def test_gsm8k() -> None:
    assert GSM8K is not None
    records = list(read_records(Path(GSM8K) / "test.jsonl"))
    assert len(records) == 1319
    for record in records:
        assert record.reply("reference")[0]["content"].replace(",", "").endswith(f"#### {record.gt}")


@pytest.mark.skipif(
    "GYMTUNE_TEST_BFCL" not in os.environ, reason="a folder of BFCL's files is named by GYMTUNE_TEST_BFCL"
)
@pytest.mark.parametrize(("name", "count"), [("simple_python", 400), ("multiple", 200), ("live_multiple", 1053)])
def test_bfcl(name: str, count: int) -> None:
    assert sum(1 for _ in read_records(Path(os.environ["GYMTUNE_TEST_BFCL"]) / f"BFCL_v4_{name}.json")) == count
