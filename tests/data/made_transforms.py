"""Transforms for tests. A text says itself what becomes of it: `3~…` three documents of its words, `0~…`
none, `b~…` a bad one, `e~…` an empty one, anything else stays.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

from orchestrator import BadDocument
from tests.data.format_writers import Record
from tests.data.making import some_texts

VERSION = "7"
Fields = dict[str, Any]


def as_told(document: Fields, seed: int) -> Iterator[Fields]:
    """A generator."""
    del seed
    name = "completion" if "completion" in document else "text"
    told, bar, text = document[name].partition("~")
    if not bar:
        yield document
    elif told == "b":
        yield {name: "not this one either"}
        raise BadDocument(f"{text[:5]} is bad")
    elif told == "e":
        yield {**document, name: ""}
    else:
        words = text.split(" ")
        for number in range(int(told)):
            yield {**document, name: " ".join(words[number :: int(told)])}


def twice(document: Fields, seed: int) -> list[Fields]:
    del seed
    return [document, document]


def short_ones_only(document: Fields, seed: int) -> Fields | None:
    del seed
    return document if len(document["text"]) < 90 else None


def with_its_seed(document: Fields, seed: int) -> list[Fields]:
    return [{"text": f"{seed} {document['text']}"}, {"text": f"{random.Random(seed).random()}"}]


def half(document: Fields, seed: int) -> Fields | None:
    return document if seed % 2 else None


def shorter_chats(document: Fields, seed: int) -> list[Fields]:
    """The conversation up to each of its answers."""
    del seed
    messages = document["messages"]
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [{"messages": messages[:end]} for end in ends]


def failing(document: Fields, seed: int) -> Fields:
    if "12:" in document["text"]:
        raise ValueError("no twelves")
    return {**document, "seed": seed}


def counting(document: Fields, seed: int, seen: list[int] = []) -> Fields:  # noqa: B006
    """Not pure: it knows how often it was called."""
    del seed
    seen.append(1)
    return {"text": f"{len(seen)} {document['text']}"}


MOOD = {"now": 0}


def moody(document: Fields, seed: int) -> Fields:
    """The same within an hour."""
    return document if seed % 5 else {"text": f"{MOOD['now']} {document['text']}"}


CALLS: list[int] = []


def noted(document: Fields, seed: int) -> Fields:
    """Pure, as far as anybody sees."""
    CALLS.append(seed)
    return document


def two_arguments_are_needed(document: Fields) -> Fields:
    return document


def a_text(document: Fields, seed: int) -> str:
    del seed
    return str(document["text"])


def another_field(document: Fields, seed: int) -> Fields:
    return {"txt": document["text"], "seed": seed}


def a_surrogate(document: Fields, seed: int) -> Fields:
    return {**document, "text": "\ud800", "seed": seed}


def without_end(document: Fields, seed: int) -> Iterator[Fields]:
    while seed >= 0:
        yield document


def as_rubbish(document: Fields, seed: int) -> Any:
    """No document."""
    del document, seed
    return [12]


def one_dict_over_and_over(document: Fields, seed: int) -> Iterator[Fields]:
    """As one may write it where each document is taken before the next is made."""
    del seed
    for number in range(3):
        document["text"] = f"{number} {document['text'][-5:]}"
        yield document


def louder(document: Fields, seed: int) -> Fields:
    """Changes what it was given."""
    del seed
    for message in document["messages"]:
        message["content"] += "!"
    return document


def leaving(document: Fields, seed: int) -> Fields:
    sys.exit(3)


def says_its_fields(document: Fields, seed: int) -> Fields:
    """The text, behind all that it sees beside it, by name."""
    del seed
    beside = {name: document[name] for name in sorted(document) if name != "text"}
    return {"text": f"{beside!r} {document['text']}"}


def english_with_a_score(document: Fields, seed: int) -> Fields | None:
    """A filter by other columns."""
    del seed
    return document if document["meta.lang"] == "en" and document["score"] >= 3 else None


def changes_its_fields(document: Fields, seed: int) -> Fields:
    """Changes what it was given."""
    del seed
    document["tags"].append("seen")
    return {"text": f"{document['tags']} {document['text']}"}


def some_records(num: int) -> list[Record]:
    """Texts with a score, a language inside of an object, and a list."""
    return [
        {
            "text": text,
            "score": i * 7 % 5,
            "meta": {"lang": ("en", "de", None)[i % 3], "url": f"https://host/{i}"},
            "tags": [f"t{j}" for j in range(i % 3)],
        }
        for i, text in enumerate(some_texts(num))
    ]


HERE = "tests.data.made_transforms"
TOLD = ["3~", "0~", "", "2~", "b~", "e~", "", "5~", "1~"]


def told_texts(num: int, longest: int = 40) -> list[str]:
    """Texts of which each says what becomes of it."""
    texts = [text for text in some_texts(2 * num, longest) if text][:num]
    return [TOLD[i % len(TOLD)] + text for i, text in enumerate(texts)]
