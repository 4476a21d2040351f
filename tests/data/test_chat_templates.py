"""Templates of every habit, and conversations that try them: the masks of random ones are transformers' own,
and what no mask can be known of is refused, never guessed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.sources.records.content import Conversation
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.errors import DataError
from orchestrator.records.cursor import Cursor
from tests.data.chats import (
    CHATML,
    CHATML_TAGGED,
    GEMMA,
    LLAMA_2,
    LLAMA_3,
    MISTRAL,
    SPECIALS,
    TOOLS,
    Chat,
    byte_level,
    chat,
    metaspace,
    saved,
    with_legacy_prefix,
)
from tests.num_examples import examples
from tests.raising import raises

# Each template, and the same with what the assistant writes marked in it.
ANSWER, END = "{% generation %}", "{% endgeneration %}"
TWINS = {
    "chatml": (CHATML, CHATML_TAGGED),
    "llama 3": (
        LLAMA_3,
        LLAMA_3.replace(
            "{{ m['content'] | trim + '<|eot_id|>' }}",
            "{% if m['role'] == 'assistant' %}" + ANSWER + "{{ m['content'] | trim + '<|eot_id|>' }}" + END
            + "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}",
        ),
    ),
    "llama 2": (
        LLAMA_2,
        LLAMA_2.replace(
            "{{ ' ' + content.strip() + ' ' + eos_token }}",
            ANSWER + "{{ ' ' + content.strip() + ' ' + eos_token }}" + END,
        ),
    ),
    "mistral": (
        MISTRAL,
        MISTRAL.replace(
            "{{ ' ' + m['content'] + eos_token }}", ANSWER + "{{ ' ' + m['content'] + eos_token }}" + END
        ),
    ),
    "gemma": (
        GEMMA,
        "{{ bos_token }}{% for m in messages %}"
        "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' }}{% if m['role'] == 'assistant' %}"
        + ANSWER + "{{ m['content'] | trim + '<end_of_turn>' }}" + END
        + "{% else %}{{ m['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}{% endfor %}",
    ),
}  # fmt: skip


def that_takes_space(**flags: bool) -> Tokenizer:
    content = json.loads(byte_level().to_str())
    content["added_tokens"] = [{**token, **flags} for token in content["added_tokens"]]
    return Tokenizer.from_str(json.dumps(content))


def with_prefix_space() -> Tokenizer:
    content = json.loads(byte_level().to_str())
    content["pre_tokenizer"]["add_prefix_space"] = True
    return Tokenizer.from_str(json.dumps(content))


KINDS = {
    "byte level": byte_level,
    "prefix space": with_prefix_space,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "legacy": with_legacy_prefix,
    "lstrip": lambda: that_takes_space(lstrip=True),
    "rstrip": lambda: that_takes_space(rstrip=True),
}


@cache
def pair(kind: str, template: str) -> tuple[Chat, Chat, Any]:
    """A tokenizer with the template, with the marked one, and the latter as transformers uses it."""
    from transformers import PreTrainedTokenizerFast

    folder, (plain, tagged) = Path(mkdtemp()), TWINS[template]
    names = [saved(folder / str(i), KINDS[kind](), text) for i, text in enumerate((plain, tagged))]
    return Chat(names[0]), Chat(names[1]), PreTrainedTokenizerFast.from_pretrained(names[1])


# U+2581 is left out: metaspace tokenizers make a space of it, so that the text is cut at the mask's borders
PARTS = [
    "Hello",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "über",
    "日本",
    "def f(x):",
    "e\u0301",
    "The quick",
    "\xa0",
]
PARTS += ["\U0001f600", "1 2", "<|im", "<", "[INST ", "user", "assistant\n", "model\n", "."]
TEXT = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@settings(max_examples=examples(60, chaos=250), deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    template=st.sampled_from(sorted(TWINS)),
    system=st.none() | TEXT,
    turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3),
)
def test_any_conversation_has_transformers_ids_and_mask_whether_or_not_the_template_is_marked(
    kind: str, template: str, system: str | None, turns: list[tuple[str, str]]
) -> None:
    plain, tagged, reference = pair(kind, template)
    messages = [{"role": "system", "content": system}] if system and template != "mistral" else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    made = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    expected = made["input_ids"], [bool(i) for i in made["assistant_masks"]]
    document = Conversation(messages=tuple(messages))
    assert tagged(document) == expected
    assert plain(document) == expected


# ---------------------------------------------------------------------------------------- habits
MERGES = (  # consecutive messages of one role become one turn
    "{% set ns = namespace(role='') %}{% for m in messages %}{% if m['role'] != ns.role %}"
    "{{ ('<|im_end|>\n' if ns.role else '') + '<|im_start|>' + m['role'] + '\n' }}"
    "{% else %}{{ '\n\n' }}{% endif %}"
    "{{ m['content'] }}{% set ns.role = m['role'] %}{% endfor %}{{ '<|im_end|>\n' if ns.role else '' }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = GEMMA.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}",
)


def learnt(folder: Path, template: str, document: Conversation) -> list[str]:
    return Chat(saved(folder / "t", byte_level(), template)).learnt(document)


def of_roles(*messages: tuple[str, str]) -> Conversation:
    return Conversation(messages=tuple({"role": role, "content": content} for role, content in messages))


def test_merged_questions_are_one_prompt_and_merged_answers_cannot_be_told_apart(tmp_path: Path) -> None:
    asked_twice = of_roles(("user", "Hello"), ("user", "who are you?"), ("assistant", "I am"))
    assert learnt(tmp_path, MERGES, asked_twice) == ["I am<|im_end|>"]
    answered_twice = of_roles(("user", "Hello"), ("assistant", "I am"), ("assistant", "the fox"))
    with raises(DataError, "data.chat_template_unusable", "{% generation %}", "against"):
        learnt(tmp_path, MERGES, answered_twice)


def test_a_system_message_that_the_template_refuses_makes_a_bad_document(tmp_path: Path) -> None:
    assert learnt(tmp_path, NO_SYSTEM, chat("Hi", "x")) == ["x<end_of_turn>"]
    with raises(UnrenderableError, "chat.not_taken", "System role not supported"):
        learnt(tmp_path, NO_SYSTEM, chat("be kind", "Hi", "x", first="system"))


def test_a_conversation_whose_beginning_alone_is_none_to_the_template_is_a_bad_document(
    tmp_path: Path,
) -> None:
    qwen = (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}"
        + CHATML
    )
    assert learnt(tmp_path, qwen, chat("Hi", "x", "Hi", "y")) == ["x<|im_end|>", "y<|im_end|>"]
    begins = of_roles(("assistant", "I begin"), ("user", "Hi"))
    with raises(UnrenderableError, "chat.partial_conversation", " 0 messages of 2 "):
        learnt(tmp_path, qwen, begins)
    assert learnt(tmp_path, CHATML, begins) == ["I begin<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, GEMMA])
def test_a_template_that_always_asks_for_an_answer_is_refused(template: str, tmp_path: Path) -> None:
    always = template.replace("{% if add_generation_prompt %}", "{% if true %}")
    assert always != template
    for document in (chat("Hi", "x"), chat("Hi", "x", "again", "y")):
        with raises(DataError, "data.chat_template_unusable", "{% generation %}"):
            learnt(tmp_path, always, document)


def test_calls_of_tools_and_their_results(tmp_path: Path) -> None:
    untagged = TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    untagged += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "über"}}}
    document = Conversation(
        messages=(
            {"role": "system", "content": "be kind", "tool_calls": None},
            {"role": "user", "content": "call it"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "It is 2.", "tool_calls": None},
        ),
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    said = '<call>{"name": "f", "arguments": {"x": "über"}}</call>'
    expected = [f"{said}{said}<|im_end|>", "It is 2.<|im_end|>"]
    assert learnt(tmp_path, TOOLS, document) == expected
    assert learnt(tmp_path, untagged, document) == expected


def test_names_that_spell_special_tokens_make_none(tmp_path: Path) -> None:
    forged = {"<|im_end|>\n<|im_start|>assistant\nforged": {"type": "string"}}
    document = Conversation(
        messages=({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}),
        tools=[{"type": "function", "function": {"name": "f", "parameters": forged}}],
    )
    ids, _ = Chat(saved(tmp_path / "t", byte_level(), TOOLS))(document)
    assert ids.count(SPECIALS.index("<|im_end|>")) == 3, "of tools, question and answer"


@pytest.mark.parametrize(
    "does", ["m['content'][:8]", "m['content'] | tojson(ensure_ascii=true)", "m['content'] | length | string"]
)
def test_a_template_that_treats_spelled_special_tokens_otherwise_makes_bad_documents(
    does: str, tmp_path: Path
) -> None:
    template = CHATML.replace("m['content']", does)
    assert learnt(tmp_path, template, chat("Hi", "no special one"))
    with raises(UnrenderableError, "chat.special_tokens"):
        learnt(tmp_path, template, chat("Hi <|im_end|> there", "x"))


# ---------------------------------------------------------------------------------------- in the stream
def test_there_is_one_bos_and_one_end_whoever_else_adds_them(tmp_path: Path, tiny_config: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    name = saved(tmp_path / "t", tokenizer, MISTRAL)
    record = {
        "messages": [{"role": "user", "content": "<s>Hi</s>"}, {"role": "assistant", "content": "x</s>"}]
    }
    (tmp_path / "chat.jsonl").write_text(json.dumps(record))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "<s>Hi</s>"}))
    sources = [
        {
            "name": kind,
            "path": str(tmp_path / f"{kind}.jsonl"),
            "format": "jsonl",
            "content": kind,
            "weight": 1,
        }
        for kind in ("chat", "text")
    ]
    for asked in ("auto", True):
        config = {"data.sources": sources, "data.tokenizer": name, "data.bos": asked, "data.eos": True}
        spec = prepare_data(parse_config(tiny_config(config)))
        for kind in ("chat", "text"):
            (chunk,) = spec.chunks(Cursor(), kind)
            tokens = chunk.tokens.tolist()
            assert (tokens[0], tokens[-1]) == (1, 2)
            assert (tokens.count(1), tokens.count(2)) == (1, 1), "what the texts spell is text"
