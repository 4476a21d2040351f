"""Who encodes which documents, through any row of changes, and what a machine must have for it."""

import pytest

from orchestrator.json_form import decode, encode
from orchestrator.planning.encoders import (
    EncoderChoice,
    EncoderSpan,
    choose_next,
    encoder_at,
    with_encoder,
)
from orchestrator.records.cursor import Cursor, SourceCursor

FAST, NEWER, SLOW = (
    EncoderChoice(name=n, version=v)
    for n, v in (("gigatoken", "0.3"), ("gigatoken", "0.4"), ("tokenizers", "9"))
)
FIRST = (EncoderSpan(encoder=FAST),)
BOTH = {"gigatoken": "0.3", "tokenizers": "9"}
PACKAGES, MISSING = "machine.packages", "machine.missing_package"
NO_FAST, NEW_FAST = {**BOTH, "gigatoken": None}, {**BOTH, "gigatoken": "0.4"}


def at(epoch=0, block=0, window=0, record=0, token=0):
    source = SourceCursor(epoch=epoch, block=block, window=window, record=record, token=token)
    return Cursor(consumed_samples=1, consumed_tokens=64, target_tokens=64, sources={"s": source})


def test_a_document_is_made_by_the_last_encoder_that_has_begun():
    spans = with_encoder(FIRST, SLOW, {"s": (0, 2, 0, 5)})
    spans = with_encoder(spans, FAST, {"s": (1, 0, 0, 0)})
    places = [
        (0, 0, 0, 0),
        (0, 2, 0, 4),
        (0, 2, 0, 5),
        (0, 2, 1, 0),
        (0, 9, 9, 9),
        (1, 0, 0, 0),
        (7, 0, 0, 0),
    ]
    assert [encoder_at(spans, "s", place) for place in places] == [FAST, FAST, SLOW, SLOW, SLOW, FAST, FAST]


def test_what_never_began_is_forgotten():
    later = with_encoder(FIRST, SLOW, {"s": (0, 2, 0, 5)})
    assert with_encoder(later, NEWER, {"s": (0, 2, 0, 5)}) == with_encoder(FIRST, NEWER, {"s": (0, 2, 0, 5)})
    assert with_encoder(later, FAST, {"s": (0, 2, 0, 5)}) == FIRST, "back before it began"
    assert with_encoder(FIRST, SLOW, {}) == (EncoderSpan(encoder=SLOW),), "nothing was trained yet"


def test_spans_survive_their_json():
    spans = with_encoder(FIRST, SLOW, {"s": (0, 2, 0, 5)})
    assert tuple(decode(EncoderSpan, encode(span)) for span in spans) == spans


@pytest.mark.parametrize(
    ("spans", "wanted", "cursor", "installed", "encoder", "refused"),
    [
        (FIRST, "auto", at(), BOTH, FAST, []),
        (FIRST, "gigatoken", at(), BOTH, FAST, []),
        (FIRST, "tokenizers", at(), BOTH, SLOW, []),
        (FIRST, "tokenizers", Cursor(), NO_FAST, SLOW, []),
        (FIRST, "gigatoken", Cursor(), NEW_FAST, NEWER, []),
        (FIRST, "auto", Cursor(), NEW_FAST, FAST, [(PACKAGES, ("gigatoken 0.3,", "gigatoken 0.4"))]),
        (FIRST, "gigatoken", at(), NEW_FAST, NEWER, [(PACKAGES, ("began", "gigatoken 0.3,", "0.4"))]),
        (FIRST, "tokenizers", at(), NO_FAST, SLOW, [(PACKAGES, ("(not installed)", "gigatoken==0.3"))]),
        (FIRST, "tokenizers", at(), {"gigatoken": "0.3"}, FAST, [(MISSING, ("encoder=tokenizers",))]),
    ],
)  # fmt: skip
def test_a_machine_must_have_who_encodes_and_who_has_begun_the_document(
    spans, wanted, cursor, installed, encoder, refused
):
    found, refusals = choose_next(spans, wanted, cursor, installed)
    assert (found, [refusal.code for refusal in refusals]) == (encoder, [code for code, _ in refused])
    for (_, values), refusal in zip(refused, refusals, strict=True):
        assert all(value in refusal.text for value in values), refusal.text


def test_after_a_change_auto_stays_with_the_new_one_and_the_old_one_is_needed_no_longer_than_its_document():
    spans = with_encoder(FIRST, SLOW, {"s": (0, 2, 0, 5)})
    assert choose_next(spans, "auto", at(block=2, record=5), NO_FAST) == (SLOW, ())
    inside = choose_next(spans, "auto", at(block=2, record=4, token=3), NO_FAST)
    assert (inside[0], len(inside[1])) == (SLOW, 1)
