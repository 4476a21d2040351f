"""Renders conversations with a tokenizer's chat template into text, special tokens and targets.

It renders as transformers does (jinja2 in a sandbox, the same filters), except that a template has no clock,
so that it renders the same at any time. Importing it takes 0.15 s, so it is imported only for rendering.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.data.sources.records.content import Conversation
from orchestrator.data.tokens.chat_template import (
    DEFAULT,
    WITH_TOOLS,
    ChatTemplate,
    Rendered,
    Span,
    SpecialToken,
    UnrenderableError,
    UnrenderableValueError,
    require_no_json_text,
    require_texts,
    with_arguments,
    with_reasoning,
    without_nulls,
)
from orchestrator.errors import DataError

_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Private-use characters that mark borders during rendering. Others are used if a text contains these.
_FIRST_MARK, _LAST_MARK, _NUM_MARKS = 0xF0000, 0xFFFFC, 4
_LISTED = "listed"  # the filter around the iterable of a template's loop
_SHOWN = 120  # characters of a template's line that a message shows


class Renderer:
    """Renders conversations with one template. Not thread-safe. Does not pickle."""

    def __init__(self, template: ChatTemplate, specials: Sequence[SpecialToken]) -> None:
        """`specials` are the tokenizer's special tokens.

        Raises `DataError` with the line if a template has a syntax error.
        """
        self._variables = template.variables
        self._environment = environment = _environment()
        extension = environment.extensions[_Generation.identifier]
        assert isinstance(extension, _Generation), "it was built with it"
        self._generation = extension
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in template.sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                text = _syntax_error(name, source, error)
                raise DataError(text, code="tokenizer.chat_template_syntax") from error
        self._tagged = {name for name, source in template.sources.items() if _TAG.search(source)}
        self._template_text = "".join(template.sources.values())
        self._specials = {special.text: special for special in specials}
        longest_first = sorted(filter(None, self._specials), key=lambda text: (-len(text), text))
        self._any_special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelled = re.compile(self._any_special)
        self._made_of_nothing: dict[str, str] = {}

    def render(self, conversation: Conversation, loss: str, parse: bool) -> Rendered:
        """Renders the conversation and determines its trained parts.

        `loss` is `assistant` (its turns), `last` (its last turn) or `all`. Special tokens that the messages
        spell stay text unless `parse`. Raises `UnrenderableError` if the template does not accept the
        conversation, `DataError` if the template does not show which parts are the assistant's.
        """
        self._environment.reads_letters = conversation.as_stored
        own, tools = without_nulls(conversation.messages), conversation.tools
        given = own
        variables = dict(conversation.template_kwargs)
        strings = list(_strings([given, tools, variables]))
        marks = self._free_marks(strings)
        spelled = sum(len(self._spelled.findall(text)) for text in strings)

        def text(messages: list[Any]) -> str:
            return self.text_of(_Shown(messages, tools, variables), "\0\0\0\0")

        if not conversation.as_stored:
            given = with_arguments(with_reasoning(own), text)
        turns = _Turns(self, _Shown(given, tools, variables), marks)
        if not conversation.as_stored:
            require_texts(given, own, turns.text, text)
        if spelled and not parse:
            around = f"{marks[0]}\\g<0>{marks[1]}"
            plain, shown = turns.text, (self._marked(each, around) for each in (given, tools, variables))
            turns = _Turns(self, _Shown(*shown), marks)
            if _unmarked(turns.text, marks) != _unmarked(plain, marks):
                raise UnrenderableError(
                    "its messages spell special tokens, and the tokenizer's chat_template does not treat "
                    "them as any other text",
                    code="chat.special_tokens",
                )
        targets = turns.targets(loss, not conversation.as_stored, conversation.num_given)
        return self._read(turns.text, targets, marks, spelled, tagged=turns.tagged)

    def text_of(self, shown: _Shown, marks: str, prompt: bool = False) -> str:
        """The template's output for these values, with marks. Raises whatever the template raises."""
        self._generation.marks = marks[2:]
        variables = {"documents": None, **self._variables, **shown.variables}
        return self._templates[self._name(shown.tools)].render(
            messages=shown.messages, tools=shown.tools, add_generation_prompt=prompt, **variables
        )

    def always_added(self, tools: Any) -> str:
        """The template's output without messages and BOS.

        It is the beginning of an answer if the template ignores `add_generation_prompt`, else mostly empty.
        Empty if it does not accept an empty conversation.
        """
        name = self._name(tools)
        if name not in self._made_of_nothing:
            try:
                made = self.text_of(_Shown([], tools, {}), "\0\0\0\0")
            except Exception:  # noqa: BLE001  a template may raise anything
                made = ""
            self._made_of_nothing[name] = made.removeprefix(self._variables.get("bos_token", "")).strip()
        return self._made_of_nothing[name]

    def is_tagged(self, tools: Any) -> bool:
        """Whether the template itself marks what the assistant wrote."""
        return self._name(tools) in self._tagged

    def _name(self, tools: Any) -> str:
        return WITH_TOOLS if tools is not None and WITH_TOOLS in self._templates else DEFAULT

    def _free_marks(self, strings: list[str]) -> str:
        """Characters that occur neither in the template nor in the conversation."""
        for first in range(_FIRST_MARK, _LAST_MARK, _NUM_MARKS):
            marks = "".join(map(chr, range(first, first + _NUM_MARKS)))
            if not any(mark in text for mark in marks for text in (self._template_text, *strings)):
                return marks
        raise UnrenderableError(
            "it holds every private character of Unicode's plane 15", code="chat.private_characters"
        )

    def _marked(self, value: Any, around: str) -> Any:
        """`value` with marks around the special tokens that its texts spell."""
        if isinstance(value, str):
            return self._spelled.sub(around, value)
        if isinstance(value, Mapping):
            return {self._marked(key, around): self._marked(each, around) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(each, around) for each in value]
        return value

    def _read(self, marked: str, targets: list[Span], marks: str, spelled: int, tagged: bool) -> Rendered:
        """The rendered text without its marks, and the spans from the marks and its special tokens."""
        text_begin, text_end = marks[0], marks[1]
        pattern = re.compile(
            f"{text_begin}(?:{self._any_special}){text_end}|[{marks}]|(?P<special>{self._any_special})"
        )
        dropped: list[int] = []
        specials: list[tuple[int, int, SpecialToken]] = []
        for match in pattern.finditer(marked):
            if match["special"] is not None:
                start = match.start() - len(dropped)
                specials.append((start, start + len(match["special"]), self._specials[match["special"]]))
            elif len(match[0]) == 1:
                dropped.append(match.start())
            else:
                dropped += [match.start(), match.end() - 1]
        text = _unmarked(marked, marks)
        spans = [(a - bisect_left(dropped, a), b - bisect_left(dropped, b)) for a, b in targets]
        if not tagged:
            spans = [_without_tail(text, span, specials) for span in spans]
        return Rendered(
            text=text,
            specials=tuple(specials),
            targets=tuple(span for span in spans if span[0] < span[1]),
            special_texts=spelled,
        )


@dataclass(frozen=True, slots=True)
class _Shown:
    """The input of a template. `variables` are those that a record sets."""

    messages: list[Any]
    tools: Any
    variables: Mapping[str, Any]


class _Turns:
    """One conversation, rendered as a whole and, if needed, turn by turn. Spans count in marked text."""

    def __init__(self, renderer: Renderer, shown: _Shown, marks: str) -> None:
        self._renderer, self._shown, self._marks = renderer, shown, marks
        self._messages, self._tools = shown.messages, shown.tools
        self.tagged = renderer.is_tagged(shown.tools)
        try:
            self.text = renderer.text_of(shown, marks)
        except Exception as error:  # a template may raise anything
            raise _not_taken(error) from error

    def targets(self, loss: str, weighted: bool, num_given: int = 0) -> list[Span]:
        """The spans to be trained, without the first `num_given` messages.

        `weighted`: also without messages whose `weight` is 0.
        """
        weights = (message.get("weight") if weighted else None for message in self._messages)
        left_out = {i for i, weight in enumerate(weights) if i < num_given or weight == 0}
        if loss == "all":
            self.tagged = True  # no cut at the turns' ends
            return _outside([self._message(number) for number in sorted(left_out)], len(self.text))
        turns = [i for i, message in enumerate(self._messages) if message.get("role") == "assistant"]
        turns = turns[-1:] if loss == "last" else turns
        if not self.tagged:
            return [self._turn(number) for number in turns if number not in left_out]
        spans = self._tagged_spans(self.text)
        first = self._num_spans_before(turns[0]) if loss == "last" and spans and turns else 0
        dropped = {i for number in left_out.intersection(turns) for i in self._spans_of(number, len(spans))}
        return [span for i, span in enumerate(spans) if i >= first and i not in dropped]

    def _spans_of(self, number: int, num_spans: int) -> range:
        """The indices of the marked spans of an assistant's turn: one each, or as partial renderings show."""
        turns = [i for i, message in enumerate(self._messages) if message.get("role") == "assistant"]
        if len(turns) == num_spans:
            return range(turns.index(number), turns.index(number) + 1)
        return range(self._num_spans_before(number), self._num_spans_before(number + 1))

    def _num_spans_before(self, number: int) -> int:
        return len(self._tagged_spans(self._part(number)))

    def _message(self, number: int) -> Span:
        """The template's whole output for a message, including its role."""
        before, after = self._part(number), self._part(number + 1)
        self._require_begins(before, after, f"the messages before message {number}")
        self._require_begins(after, self.text, f"the messages up to message {number}")
        return len(before), len(after)

    def _tagged_spans(self, text: str) -> list[Span]:
        begin, end = self._marks[2], self._marks[3]
        return [match.span(1) for match in re.finditer(f"{begin}([^{end}]*){end}", text)]

    def _turn(self, number: int) -> Span:
        """The span of an assistant's turn, from two renderings that are prefixes of the whole."""
        before, after = self._part(number, prompt=True), self._part(number + 1)
        asked = f"the messages before message {number} (with add_generation_prompt)"
        self._require_begins(before, after, asked)
        self._require_begins(after, self.text, f"the messages up to message {number}")
        added = self._renderer.always_added(self._tools)
        if added and before.rstrip().endswith(added) and after.rstrip().endswith(added):
            raise _refused(
                f"it has no {{% generation %}}, and ends every conversation with the prompt {added!r} for an "
                "answer, also without add_generation_prompt"
            )
        return len(before), len(after)

    def _require_begins(self, shorter: str, longer: str, what: str) -> None:
        if not longer.startswith(shorter):
            raise _refused(
                f"it has no {{% generation %}}, and its text for {what} is not the beginning of its text for "
                f"more of them: {_around(shorter, longer)}"
            )

    def _part(self, number: int, prompt: bool = False) -> str:
        if not number and not prompt:
            return ""
        try:
            shown = replace(self._shown, messages=self._messages[:number])
            return self._renderer.text_of(shown, self._marks, prompt)
        except Exception as error:  # a template may raise anything
            raise UnrenderableError(
                "the tokenizer's chat_template has no {% generation %}, and does not take the first "
                f"{number} messages of {len(self._messages)} alone: {error}",
                code="chat.partial_conversation",
            ) from error


def _not_taken(error: Exception) -> UnrenderableError:
    """The reason for a conversation on which the template failed with this error."""
    if isinstance(error, jinja2.UndefinedError) and "strftime_now" in str(error):
        return UnrenderableError(
            "the tokenizer's chat_template does not take it: it asks for the date (strftime_now), and a "
            "template gets no clock here, so that a stream does not depend on the day; write a date into the "
            "template, or set one by chat_template_kwargs",
            code="chat.template_clock",
        )
    if isinstance(error, TypeError):
        return UnrenderableValueError(
            f"the tokenizer's chat_template does not take it: {error}", code="chat.value_type"
        )
    return UnrenderableError(
        f"the tokenizer's chat_template does not take it: {error}", code="chat.not_taken"
    )


def _outside(spans: list[Span], length: int) -> list[Span]:
    """The parts of a text outside the spans, which are in order."""
    starts, stops = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), length]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _without_tail(text: str, span: Span, specials: Sequence[tuple[int, int, SpecialToken]]) -> Span:
    """A turn without the white space after its last special token: the model has ended its turn there."""
    start, stop = span
    last = max((end for _, end, _ in specials if start < end <= stop), default=stop)
    return (start, last) if not text[last:stop].strip() else span


def _unmarked(text: str, marks: str) -> str:
    return text.translate(dict.fromkeys(map(ord, marks)))


def _around(shorter: str, longer: str) -> str:
    """The place where two texts diverge, as a message."""
    first = next(
        (i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b),
        min(len(shorter), len(longer)),
    )
    here = slice(max(0, first - 20), first + 20)
    return f"…{shorter[here]!r} against …{longer[here]!r} at character {first}"


def _syntax_error(name: str, source: str, error: jinja2.TemplateSyntaxError) -> str:
    line = next(islice(source.splitlines(), error.lineno - 1, None), "").strip()
    shown = line if len(line) <= _SHOWN else line[:_SHOWN] + "…"
    which = "chat_template" if name == DEFAULT else f"chat_template {name}"
    return (
        f"its {which} has a syntax error in line {error.lineno}: {error.message}; the line is {shown!r}. "
        "Correct the template"
    )


def _refused(why: str) -> DataError:
    return DataError(
        f"the tokenizer's chat_template cannot be used: {why}; mark what the assistant writes with "
        "{% generation %} … {% endgeneration %} in it, or set data.sources[].loss=all, in a new run (another "
        "run.name)",
        code="data.chat_template_unusable",
    )


def _strings(value: Any) -> Iterator[str]:
    """All texts inside a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)


# ------------------------------------------------------------------------------------- the environment
class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: puts its body between two marks."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.marks = ""

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{self.marks[:1]}{caller()}{self.marks[1:]}"


class _Environment(ImmutableSandboxedEnvironment):
    """Loops and `join` refuse the JSON text of a list or an object, unless `reads_letters`."""

    reads_letters = False

    def _generate(
        self,
        source: jinja2.nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _LISTED, [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def listed(self, value: Any) -> Any:
        """The iterable of a loop. Raises `TypeError` for a JSON text."""
        if not self.reads_letters:
            require_no_json_text(value)
        return value


@jinja2.pass_eval_context
def _join(context: jinja2.nodes.EvalContext, value: Any, *args: Any, **named: Any) -> str:
    assert isinstance(context.environment, _Environment), "it is no other's filter"
    return jinja2.filters.sync_do_join(context, context.environment.listed(value), *args, **named)


def _environment() -> _Environment:
    """The environment of a template as in transformers, without `strftime_now`.

    A stream must not depend on the day. Templates that test for `strftime_now` fall back to a fixed date.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters |= {"tojson": _tojson, "join": _join, _LISTED: environment.listed}
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
