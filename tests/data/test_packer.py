"""The packer on chunks made by hand: steps, ends, orders that are wrong, and what a drawn step keeps."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.errors import DataError, FeedError
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.digest import sample_digest
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import BAD, EMPTY, PIECE, TokenChunk
from tests.raising import raises

ONE = StreamSettings(num_epochs=1)


def chunk(
    documents: list[list[int]], block: int = 0, epoch: int = 0, first: int = 0, ends: bool = True
) -> TokenChunk:
    """A chunk with a document of one piece per list; an empty list is an empty document, [-1] a bad one."""
    kinds = [EMPTY if not d else BAD if d == [-1] else PIECE for d in documents]
    tokens = [d if kind == PIECE else [] for d, kind in zip(documents, kinds, strict=True)]
    num = len(documents)
    return TokenChunk(
        source="s",
        epoch=epoch,
        block=block,
        window=0,
        tokens=np.array([t for d in tokens for t in d], np.int32),
        record=np.arange(first, first + num, dtype=np.int32),
        piece=np.zeros(num, np.int32),
        num_tokens=np.array([len(d) for d in tokens], np.int32),
        kind=np.array(kinds, np.int32),
        last_piece=np.ones(num, np.int32),
        special_texts=np.zeros(num, np.int32),
        file=np.zeros(num, np.int32),
        place=np.arange(first, first + num, dtype=np.int64),
        bad_reasons=tuple(f"bad {first + i}" for i in range(num) if kinds[i] == BAD),
        ends_window=ends,
        ends_block=ends,
    )


def packer_of(
    *chunks: TokenChunk, settings: StreamSettings = ONE, blocks: int = 1, done: bool = True
) -> Stream:
    packer = Stream(
        Cursor(),
        [StreamSource(name="s", number=0, num_blocks=lambda _: blocks, num_epochs=settings.num_epochs)],
        settings,
    )
    for one in chunks:
        packer.feed(one)
    if done:
        packer.finish("s")
    return packer


def draw(packer: Stream, asked: StepRange) -> StepSamples:
    """The step, which must be there."""
    drawn = packer.draw(asked)
    assert drawn is not None
    return drawn


def reasons(drawn: StepSamples) -> tuple[str, ...]:
    """Why documents of its source are bad."""
    assert {source for source, _ in drawn.bad_reasons} <= {"s"}
    return tuple(reason for _, reason in drawn.bad_reasons)


def step(first: int, tokens: int, seq_len: int) -> StepRange:
    return StepRange(
        first_sample=first, num_samples=ceil_div(tokens, seq_len), num_tokens=tokens, seq_len=seq_len
    )


def test_inputs_labels_and_document_ids_are_those_of_the_rules() -> None:
    drawn = draw(packer_of(chunk([[1, 2, 3], [], [4, 5], [6, 7, 8, 9]])), step(0, 8, 4))
    batch = drawn.slice(0, 2)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch.labels.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]
    assert drawn.end_of_data
    assert batch.cursor.sources["s"] == SourceCursor(
        record=3,
        token=3,
        prefix_digest=drawn.cursor.sources["s"].prefix_digest,
        documents=2,
        empty_documents=1,
    )
    assert batch.step_targets == 8


def test_a_token_budget_shortens_the_last_sample_and_the_stream_goes_on_behind_it() -> None:
    packer = packer_of(chunk([list(range(1, 30))]))
    first, second = draw(packer, step(0, 6, 4)), draw(packer, step(2, 4, 4))
    batch = first.slice(0, 2)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 4, 5], [6, 7, -100, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1]]
    assert (first.cursor.consumed_samples, first.cursor.consumed_tokens) == (2, 6)
    assert second.slice(2, 3).input_ids.tolist() == [[7, 8, 9, 10]]


def test_the_end_gives_fewer_samples_and_says_so_also_when_it_is_exact() -> None:
    packer = packer_of(chunk([list(range(11))]))  # ten positions
    exact = draw(packer, step(0, 10, 5))
    assert exact.end_of_data
    assert exact.step == step(0, 10, 5)
    nothing = draw(packer, step(2, 10, 5))
    assert nothing.end_of_data
    assert (nothing.step.num_samples, nothing.step.num_tokens, nothing.digest) == (0, 0, 0)
    assert nothing.cursor == exact.cursor
    assert nothing.slice(2, 2).input_ids.shape == (0, 5)
    fewer = draw(packer_of(chunk([list(range(11))])), step(0, 40, 4))
    assert fewer.step == step(0, 10, 4)
    assert fewer.end_of_data


def test_a_step_waits_until_it_is_known_whether_something_follows() -> None:
    packer = packer_of(chunk([[1, 2, 3]]), settings=StreamSettings(num_epochs=2), done=False)
    assert packer.buffered_tokens("s") == 2
    assert packer.draw(step(0, 2, 2)) is None
    packer.feed(chunk([[1, 2, 3]], epoch=1))
    drawn = draw(packer, step(0, 2, 2))
    assert not drawn.end_of_data
    packer.finish("s")
    packer.finish("s")  # once more says the same
    assert packer.buffered_tokens("s") == 3


@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=8).filter(
        lambda ds: sum(map(len, ds)) > 1
    ),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=6),
)
def test_any_steps_hold_every_token_once(documents: list[list[int]], shapes: list[tuple[int, int]]) -> None:
    packer, stream = packer_of(chunk(documents)), [t for d in documents for t in d]
    inputs: list[int] = []
    labels: list[int] = []
    first, turn = 0, 0
    while True:
        seq_len, tokens = shapes[turn % len(shapes)]
        drawn = draw(packer, step(first, tokens, seq_len))
        _, ids, targets, marks = drawn.arrays(0, drawn.step.num_samples)
        assert ((targets == -100) == (marks == -1)).all()
        inputs += ids[targets != -100].tolist()
        labels += targets[targets != -100].tolist()
        first, turn = first + drawn.step.num_samples, turn + 1
        assert drawn.cursor.consumed_tokens == len(inputs)
        if drawn.end_of_data:
            break
    assert (inputs, labels) == (stream[:-1], stream[1:])


def test_a_drawn_step_is_not_touched_by_later_ones_and_serves_slices_again() -> None:
    packer = packer_of(chunk([list(range(100))]))
    first = draw(packer, step(0, 20, 5))
    before = pickle.dumps(first.slice(1, 3))
    packer.draw(step(4, 20, 5))
    assert pickle.dumps(first.slice(1, 3)) == before
    assert first.nbytes >= 21 * 4


def test_a_steps_digest_is_the_sum_over_its_samples_however_it_is_sliced() -> None:
    drawn = draw(packer_of(chunk([[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5]])), step(0, 10, 4))
    total = 0
    for start in range(3):
        batch = drawn.slice(start, start + 1)
        assert batch.step_digest == drawn.digest
        total += sample_digest(start, 0, 4, batch.input_ids[0], batch.labels[0], batch.document_ids[0])
    assert drawn.digest == total % 2**64


def test_samples_outside_the_step_are_refused() -> None:
    drawn = draw(packer_of(chunk([list(range(30))])), step(0, 20, 5))
    with raises(FeedError, "feed.outside_step", "[2, 5)", "[0, 4)"):
        drawn.slice(2, 5)


def test_a_step_that_does_not_begin_where_the_stream_stands_is_refused() -> None:
    with raises(FeedError, "feed.step_order", "sample 3 ", "sample 0;"):
        packer_of(chunk([list(range(30))])).draw(step(3, 5, 5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block": 1},
        {"epoch": 1},
        {"window": 1},
        {"source": "other"},
    ],
)
def test_chunks_out_of_order_are_refused(wrong: dict[str, object]) -> None:
    with raises(FeedError, "feed.chunk_order", *(f"{name} {value}" for name, value in wrong.items())):
        packer_of(replace(chunk([[1, 2]]), **wrong), blocks=2)


def test_a_stream_that_ends_too_early_is_refused_not_taken_for_the_end_of_data() -> None:
    with raises(FeedError, "feed.ended_early", "epoch 0, block 1, window 0"):
        packer_of(chunk([[1, 2, 3]]), blocks=2)
    with raises(FeedError, "feed.ended_early", "epoch 1, block 0"):
        packer_of(chunk([[1, 2, 3]]), settings=StreamSettings(num_epochs=2))
    with raises(FeedError, "feed.ended_early", "window 0"):
        packer_of(chunk([[1, 2, 3]], ends=False))


def test_an_epoch_of_fewer_than_two_tokens_stops() -> None:
    for documents, num_tokens in (([], 0), ([[]], 0), ([[7]], 1), ([[-1]], 0)):
        with raises(DataError, "data.nothing_to_train", f"{num_tokens} tokens"):
            packer_of(chunk(documents), settings=StreamSettings(max_bad_share=1.0))


def test_too_many_bad_documents_stop_at_the_epochs_end_and_before_it_among_many() -> None:
    good = [[1, 2]] * 99
    packer_of(chunk([*good, [-1]]))
    with raises(DataError, "data.too_many_bad", "2 of the first 101", "source s"):
        packer_of(chunk([*good, [-1], [-1]]))
    packer_of(chunk([[-1], [1, 2]]), done=False, blocks=2)  # too few to judge
    with raises(DataError, "data.too_many_bad", "11 of the first 1001"):
        packer_of(chunk([[-1]] * 11 + [[1, 2]] * 990), done=False, blocks=2)


def test_bad_documents_are_named_once_by_the_step_that_passes_them() -> None:
    packer = packer_of(
        chunk([[-1], [1, 2, 3], [-1], [4, 5], [-1]]),
        chunk([[-1], [1, 2, 3], [4, 5]], epoch=1),
        settings=StreamSettings(num_epochs=2, max_bad_share=1.0),
    )
    named = []
    for first in range(5):
        drawn = draw(packer, step(first, 2, 2))
        named.append((reasons(drawn), drawn.cursor.sources["s"].bad_documents))
    # position 2; 4; 6 (the second epoch's token 1); 8; the last
    assert named == [(("bad 0",), 1), (("bad 2",), 2), (("bad 4", "bad 0"), 4), ((), 4), ((), 4)]


def test_bad_documents_behind_the_last_token_are_named_by_the_last_step() -> None:
    def chunks() -> list[TokenChunk]:
        first = chunk([[1, 2, 3], [-1], [4, 5], [-1]], ends=False)
        return [first, chunk([[-1], []], first=4, ends=False), chunk([[-1]], first=6)]

    lax = StreamSettings(num_epochs=1, max_bad_share=1.0)
    packer = packer_of(*chunks(), settings=lax)
    first, last, nothing = (draw(packer, step(at, 2, 2)) for at in range(3))
    assert (first.bad_reasons, first.end_of_data) == ((), False)
    assert reasons(last) == ("bad 1", "bad 3", "bad 4", "bad 6")
    assert last.end_of_data
    assert nothing.bad_reasons == ()
    # a longer run goes on at the last token, passes them then, and counts each once
    assert last.cursor.sources["s"].bad_documents == 1
    more = packer_of(*chunks(), chunk([[7, 8]], epoch=1), settings=replace(lax, num_epochs=2))
    assert draw(more, step(0, 5, 5)).cursor.sources["s"].bad_documents == 4


def test_a_border_of_epochs_leaves_the_next_epochs_first_documents_uncounted() -> None:
    packer = packer_of(
        chunk([[1, 2], [-1]]),
        chunk([[], [-1], [1, 2]], epoch=1),
        settings=StreamSettings(num_epochs=2, max_bad_share=1.0),
    )
    first, second = draw(packer, step(0, 2, 2)), draw(packer, step(1, 1, 2))
    assert first.cursor.sources["s"] == SourceCursor(epoch=1, documents=1, bad_documents=1)
    assert reasons(first) == ("bad 1",)
    assert reasons(second) == ("bad 1",)
    assert second.cursor.sources["s"].bad_documents == 2


def test_a_document_begins_with_its_first_token_even_behind_a_piece_without_any() -> None:
    first = replace(
        chunk([[1, 2], []], ends=False), kind=np.zeros(2, np.int32), last_piece=np.array([1, 0], np.int32)
    )
    second = replace(chunk([[3, 4, 5]], first=1), piece=np.ones(1, np.int32))
    drawn = draw(packer_of(first, second), step(0, 4, 4))
    assert drawn.slice(0, 1).document_ids.tolist() == [[0, 0, 1, 1]]


def test_the_prefix_digest_grows_over_steps_as_if_hashed_at_once() -> None:
    def digests(size: int) -> dict[int, str]:
        packer, found = packer_of(chunk([[1], list(range(200)), [1, 2]])), {}
        for first in range(0, 200 // size - 1):
            drawn = draw(packer, step(first, size, size))
            found[drawn.cursor.consumed_tokens] = drawn.cursor.sources["s"].prefix_digest
        return found

    fine, coarse = digests(1), digests(40)
    assert all(fine[at] == digest for at, digest in coarse.items())
    assert len(set(fine.values())) == len(fine)
