"""`content: preference`: a chosen and a rejected answer as one sample of two rows, from every format and
cursor, and what is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.first_records import check_first_records
from orchestrator.data.packing.samples import draw_past, draw_step
from orchestrator.data.packing.step_samples import loss_units
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed
from orchestrator.data.sources.records.content import BadRecordError, Content, Conversation, Preference
from orchestrator.data.sources.records.documents import document_of
from orchestrator.data.spec import DataSpec
from orchestrator.errors import BadDocumentError, ConfigError, DataError, DataIdentityError
from orchestrator.inspect.audit.reference.reference_packing import Samples
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.source_walk import TrainedDocuments
from orchestrator.launch.api import open_stream
from orchestrator.planning.batches import next_range
from orchestrator.planning.digest import sample_digest
from orchestrator.records.cursor import Cursor, SourceCursor
from tests.data.chats import CHATML, CHATML_TAGGED, LLAMA_3, byte_level, saved
from tests.data.format_writers import write_files
from tests.data.making import samples
from tests.data.preferences import (
    Make,
    padded,
    pairs,
    preference_job,
    preference_mapping,
    reference_rows,
    rows_of,
    write_pairs,
)
from tests.raising import raises

PAIRS = pairs(60)
USER = {"role": "user", "content": "Hello, who are you?"}
GOOD = {"role": "assistant", "content": "I am the assistant of the house."}
BAD = {"role": "assistant", "content": "The quick brown fox"}
MORE = {"role": "user", "content": "def f(x):"}


def small(spec: DataSpec) -> DataSpec:
    """With small pieces and chunks, so that a few pairs have many."""
    return replace(spec, settings=replace(spec.settings, piece_bytes=24, chunk_tokens=70))


def seq(spec: DataSpec) -> int:
    return spec.settings.seq_len


def ends(spec: DataSpec) -> tuple[list[int], list[int]]:
    around = (spec.settings.bos_id, spec.settings.eos_id)
    return tuple([] if token is None else [token] for token in around)  # type: ignore[return-value]


@pytest.fixture
def made(tmp_path: Path, tiny_config: Make) -> DataSpec:
    """The spec of `PAIRS` in three files, in blocks and windows."""
    write_pairs(tmp_path / "pairs", PAIRS)
    return prepare_data(preference_job(tiny_config, tmp_path / "pairs"))


def test_each_pair_is_one_sample_whose_rows_are_those_of_the_reference(
    made: DataSpec, tiny_config: Make
) -> None:
    folder = Path(tiny_config()["data"]["tokenizer"])
    expected = sorted(reference_rows(folder, record, 48, ends(made)) for record in PAIRS)
    found = rows_of(samples(made, seq(made)))
    assert sorted(found) == expected
    assert found != expected  # it is shuffled
    cursor = samples(made, seq(made))[-1].cursor
    assert (cursor.consumed_samples, cursor.consumed_tokens) == (60, 60 * 2 * 48)
    assert cursor.target_tokens == sum(t != -100 for pair in found for _, labels, _ in pair for t in labels)
    assert cursor.sources["pairs"].documents == 60


def test_a_stream_opened_at_any_pair_continues_exactly_whatever_the_pieces(made: DataSpec) -> None:
    for spec in (made, small(made)):
        whole = samples(spec, seq(spec))
        assert len(whole) == 60
        for at in (0, 1, 17, 38, 58):
            assert rows_of(samples(spec, seq(spec), whole[at].cursor)) == rows_of(whole[at + 1 :])


def test_a_cursor_inside_a_window_needs_the_same_pairs_and_the_same_length(
    made: DataSpec, tmp_path: Path, tiny_config: Make
) -> None:
    cursor = next(s.cursor for s in samples(made, seq(made)) if s.cursor.sources["pairs"].packs)
    with raises(DataIdentityError, "resume.seq_len_within_window", "keep pack.seq_len=48"):
        samples(made, 2 * 40, cursor)
    changed = [{**record, "rejected": record["rejected"] + "!"} for record in PAIRS]
    write_pairs(tmp_path / "changed", changed)
    other = prepare_data(preference_job(tiny_config, tmp_path / "changed"))
    with raises(DataIdentityError, "resume.cursor_mismatch"):
        samples(other, seq(other), cursor)


def test_the_audits_packer_makes_the_same_samples_cursors_and_finds_every_pair_once(made: DataSpec) -> None:
    whole = samples(made, seq(made))
    for first in (0, 7, 29):
        begin = whole[first - 1].cursor.sources["pairs"] if first else SourceCursor()
        cursor = Cursor(sources={"pairs": begin})
        trained = TrainedDocuments(begin.packs, "stop", 2)
        packer = ReferenceWindows(
            trained.watch(made.endless().chunks(cursor, "pairs")), begin, made.settings
        )
        for sample in whole[first:]:
            found = packer.samples(seq(made), seq(made))
            passed, packer.passed_packs = packer.passed_packs, []
            assert trained.pass_over(passed, seq(made)) is None
            assert trained.add(found, seq(made)) is None
            assert found.input_ids.reshape(2, -1).tolist() == sample.input_ids.tolist()
            labels = np.where(found.masked, -100, found.labels)
            assert labels.reshape(2, -1).tolist() == sample.labels.tolist()
            assert found.document_ids.reshape(2, -1).tolist() == sample.document_ids.tolist()
            if sample is not whole[-1]:
                assert packer.cursor() == sample.cursor.sources["pairs"]
        assert trained.end() is None


def test_the_audit_names_swapped_repeated_and_torn_pairs(made: DataSpec) -> None:
    def fault(change: Any) -> str | None:
        trained = TrainedDocuments(0, "stop", 2)
        chunks = trained.watch(made.endless().chunks(Cursor(), "pairs"))
        packer = ReferenceWindows(chunks, SourceCursor(), made.settings)
        found = packer.samples(2 * seq(made), seq(made))
        columns = (found.input_ids, found.labels, found.document_ids, found.masked)
        rows = [column.reshape(4, -1).copy() for column in columns]
        change(rows)
        names = ("input_ids", "labels", "document_ids", "masked")
        return trained.add(
            Samples(**{n: row.reshape(2, -1) for n, row in zip(names, rows, strict=True)}), 0
        )

    def swapped(rows: list[Any]) -> None:  # chosen and rejected of the first pair
        for column in (rows[0], rows[1], rows[3]):
            column[[0, 1]] = column[[1, 0]]
        rows[2][[0, 1]] = np.where(rows[2][[1, 0]] < 0, -1, np.array([[0], [1]]))

    def torn(rows: list[Any]) -> None:  # the rejected answers of two pairs
        for column in rows:
            column[[1, 3]] = column[[3, 1]]

    def repeated(rows: list[Any]) -> None:
        for column in rows:
            column[2:] = column[:2]

    def numbered(rows: list[Any]) -> None:
        rows[2][1] = np.where(rows[2][1] == 1, 0, rows[2][1])

    def learnt(rows: list[Any]) -> None:
        rows[3][0] = False

    assert fault(lambda rows: None) is None
    for change in (swapped, torn):
        assert "are no document" in (fault(change) or "")
    assert "trained already" in (fault(repeated) or "")
    assert "document ids" in (fault(numbered) or "")
    assert "another loss mask" in (fault(learnt) or "")


def test_the_digest_of_a_sample_is_that_of_both_rows(made: DataSpec) -> None:
    stream = made.stream(Cursor())
    step = next_range(0, 0, 3, seq(made))
    assert step is not None
    chunks = made.chunks(Cursor())
    drawn = draw_step(stream, step, lambda _: next(chunks, None))
    digests = [
        sample_digest(s.index, 0, 96, *(a.reshape(-1) for a in (s.input_ids, s.labels, s.document_ids)))
        for s in samples(made, seq(made))[:3]
    ]
    assert drawn.digest == sum(digests) % (1 << 64)
    share = drawn.slice(1, 3)
    assert (share.input_ids.shape, share.rows_per_sample) == ((2, 96), 2)


def count_rows(sample: Any) -> float:
    """The units of a sample, for the next test."""
    columns = (sample.input_ids, sample.labels, sample.document_ids, sample.source_ids, sample.sample_indices)
    assert all(column.shape == (2, 48) for column in columns)
    assert set(sample.sample_indices.ravel().tolist()) == {int(sample.sample_indices[0, 0])}
    return float((sample.labels[0] != -100).sum())


def test_units_are_counted_of_whole_pairs(made: DataSpec) -> None:
    found = samples(made, seq(made))[:5]
    names = ("input_ids", "labels", "document_ids")
    rows = (np.stack([getattr(sample, name).reshape(-1) for sample in found]) for name in names)
    units = loss_units(f"{__name__}:count_rows", 7, np.zeros(5, np.int32), *rows, 2)
    assert units == sum(int((s.labels[0] != -100).sum()) for s in found)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_of_an_own_loop_get_whole_pairs(world: int, tmp_path: Path, tiny_config: Make) -> None:
    write_pairs(tmp_path / "pairs", PAIRS)
    config = preference_job(tiny_config, tmp_path / "pairs")
    whole = rows_of(open_stream(config))
    found: dict[int, Any] = {}
    for rank in range(world):
        with open_stream(config, rank=rank, world_size=world).batches(micro_batches=True) as loader:
            for batch in loader:
                rows = [batch[name].tolist() for name in ("input_ids", "labels", "document_ids")]
                assert len(rows[0]) % 2 == 0
                assert len(rows[0][0]) == 48
                every = list(zip(*rows, strict=True))
                for at in range(0, len(every), 2):
                    if any(document >= 0 for document in every[at][2]):
                        found[batch["first_index"] + at // 2] = (every[at], every[at + 1])
    assert [found[i] for i in range(60)] == whole


def test_skipped_pairs_count_as_drawn(made: DataSpec) -> None:
    passed = draw_past(made, Cursor(), 10, seq(made))
    assert (passed.samples, passed.tokens) == (10, 10 * 96)
    assert rows_of(samples(made, seq(made), passed.cursor)) == rows_of(samples(made, seq(made))[10:])


def test_pairs_that_are_held_out_and_those_that_are_not_are_all_pairs(
    tmp_path: Path, tiny_config: Make
) -> None:
    write_pairs(tmp_path / "pairs", PAIRS)
    config = preference_job(tiny_config, tmp_path / "pairs", {"data.holdout": 0.25})
    held, trained = (rows_of(open_stream(config, part=part)) for part in ("holdout", "train"))
    assert 0 < len(held) < 40
    every = preference_job(tiny_config, tmp_path / "pairs")
    assert sorted(held + trained) == sorted(rows_of(open_stream(every)))


def test_several_sources_of_pairs_are_mixed_by_pairs(tmp_path: Path, tiny_config: Make) -> None:
    sources = []
    for number, name in enumerate(("a", "b")):
        write_pairs(tmp_path / name, PAIRS[number::2])
        sources.append(
            {"name": name, "path": str(tmp_path / name), "format": "jsonl", "content": "preference"}
        )
    config = preference_job(tiny_config, tmp_path, {"data.sources": sources})
    found = list(open_stream(config))
    assert [sample.source for sample in found[:6]].count("a") == 3
    assert len(rows_of(found)) == len({str(row) for row in rows_of(found)}) == 60
    last = found[-1].cursor
    assert {name: share.tokens for name, share in last.mixture.items()} == {"a": 30 * 96, "b": 30 * 96}


# ------------------------------------------------------------------------------------------ chats
def of_chats(prompt: list[Any] | None, chosen: list[Any], rejected: list[Any], **more: Any) -> dict[str, Any]:
    given = {} if prompt is None else {"prompt": prompt}
    return {**given, "chosen": chosen, "rejected": rejected, **more}


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED, LLAMA_3])
def test_chats_are_rendered_as_transformers_does_and_only_the_answers_are_learnt(
    template: str, tmp_path: Path, tiny_config: Make
) -> None:
    from transformers import PreTrainedTokenizerFast

    name = saved(tmp_path / "t", byte_level(), template)
    reference = PreTrainedTokenizerFast.from_pretrained(name)
    prompt = [USER, {"role": "assistant", "content": "Hello"}, MORE]
    end = "<|eot_id|>" if template is LLAMA_3 else "<|im_end|>"

    def row(answer: dict[str, str], number: int) -> Any:
        text = reference.apply_chat_template([*prompt, answer], tokenize=False)
        start = text.rindex(answer["content"])
        stop = start + len(answer["content"] + end)
        found = reference(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [a < stop and b > start for a, b in found["offset_mapping"]]
        given = inside.index(True)
        inputs, labels, documents = padded(found["input_ids"], given, 96, number)
        last = given + sum(inside)
        return inputs, [t if i + 1 < last else -100 for i, t in enumerate(labels)], documents

    expected = [(row(GOOD, 0), row(BAD, 1))]
    explicit, implicit = (
        of_chats(prompt, [GOOD], [BAD]),
        of_chats(None, [*prompt, GOOD], [*prompt, BAD]),
    )
    for number, (record, field) in enumerate(((explicit, "prompt"), (implicit, None))):
        folder = tmp_path / str(number)
        write_pairs(folder, [record], num_files=1)
        change = {"data.tokenizer": name, "pack.seq_len": 96}
        spec = prepare_data(preference_job(tiny_config, folder, change, prompt_field=field))
        check_first_records(spec)
        assert rows_of(samples(spec, seq(spec))) == expected


def test_answers_of_several_turns_are_learnt_from_the_first_that_differs_on(
    tmp_path: Path, tiny_config: Make
) -> None:
    name = saved(tmp_path / "t", byte_level(), CHATML)
    record = of_chats(None, [USER, GOOD, MORE, BAD], [USER, GOOD, MORE, GOOD, USER, BAD])
    write_pairs(tmp_path / "pairs", [record], num_files=1)
    change = {"data.tokenizer": name, "pack.seq_len": 200}
    spec = prepare_data(preference_job(tiny_config, tmp_path / "pairs", change, prompt_field=None))
    ((chosen, rejected),) = rows_of(samples(spec, seq(spec)))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{name}/tokenizer.json")

    def learnt(row: Any) -> str:
        return tokenizer.decode([t for t in row[1] if t != -100], skip_special_tokens=False)

    end = "<|im_end|>"
    assert learnt(chosen) == BAD["content"] + end
    assert learnt(rejected) == GOOD["content"] + end + BAD["content"] + end


def test_texts_need_no_template_and_chats_do(tmp_path: Path, tiny_config: Make) -> None:
    write_pairs(tmp_path / "texts", PAIRS[:3])
    check_first_records(prepare_data(preference_job(tiny_config, tmp_path / "texts")))
    write_pairs(tmp_path / "chats", [of_chats([USER], [GOOD], [BAD])], num_files=1)
    spec = prepare_data(preference_job(tiny_config, tmp_path / "chats"))
    with raises(ConfigError, "tokenizer.no_chat_template"):
        check_first_records(spec)


# ------------------------------------------------------------------------------------------ bad records
@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"prompt": "a", "chosen": "b"}, "record.missing_field"),
        ({"chosen": "b", "rejected": "c"}, "record.missing_field"),
        ({"prompt": "a", "chosen": None, "rejected": "c"}, "record.null_field"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "record.empty_answer"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "record.empty_answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "record.equal_answers"),
        ({"prompt": "a", "chosen": "", "rejected": ""}, "record.equal_answers"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, "record.field_type"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "record.field_type"),
        ({"prompt": 1, "chosen": 2, "rejected": 3}, "record.chat_value_type"),
        (of_chats([USER], [GOOD], [GOOD]), "record.equal_answers"),
        (of_chats([USER], [], [GOOD]), "record.empty_answer"),
        (of_chats([{"content": "x"}], [GOOD], [BAD]), "record.chat_role"),
    ],
)
def test_a_pair_that_is_none_is_a_bad_record_with_its_reason(record: dict[str, Any], code: str) -> None:
    with pytest.raises(BadRecordError) as refused:
        document_of(record, Content(kind="preference"))
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (of_chats(None, [USER, GOOD], [USER, GOOD]), "record.equal_answers"),
        (of_chats(None, [USER, GOOD], [USER]), "record.empty_answer"),
        ({"chosen": "Human: a", "rejected": "Human: b"}, "record.no_prompt"),
    ],
)
def test_whole_chats_must_differ_after_their_common_messages(record: dict[str, Any], code: str) -> None:
    with pytest.raises(BadRecordError) as refused:
        document_of(record, Content(kind="preference", prompt_field=None))
    assert refused.value.code == code


def test_an_empty_prompt_and_tools_beside_the_answers_are_read() -> None:
    found = document_of({"prompt": "", "chosen": "a", "rejected": "b"}, Content(kind="preference"))
    assert isinstance(found, Preference)
    tools = [{"name": "f"}]
    record = {"pair": of_chats([], [GOOD], [BAD], tools=json.dumps(tools))}
    names = {f"{name}_field": f"pair.{name}" for name in ("prompt", "chosen", "rejected")}
    found = document_of(record, Content(kind="preference", **names))
    assert isinstance(found, Preference)
    rows = [(row.tools, row.num_given) for row in found.rows if isinstance(row, Conversation)]
    assert rows == [(tools, 0)] * 2


def test_bad_pairs_stop_or_are_skipped_and_counted(tmp_path: Path, tiny_config: Make) -> None:
    wrong = [{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}, {"prompt": "a", "chosen": "b"}]
    write_pairs(tmp_path / "pairs", [*PAIRS[:20], *wrong, *PAIRS[20:]])
    config = preference_job(tiny_config, tmp_path / "pairs")
    spec = prepare_data(config)
    with raises(BadDocumentError, "data.bad_document", "set data.on_bad_document=skip"):
        samples(spec, seq(spec))
    change = {"data.on_bad_document": "skip", "data.max_bad_share": 0.1}
    skipping = prepare_data(preference_job(tiny_config, tmp_path / "pairs", change))
    found = samples(skipping, seq(skipping))
    at = found[-1].cursor.sources["pairs"]
    assert (len(found), at.documents, at.bad_documents) == (60, 60, 2)


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_a_pair_with_an_answer_that_is_too_long_stops_or_is_skipped_whole(
    longer: str, tmp_path: Path, tiny_config: Make
) -> None:
    long = {**PAIRS[3], longer: "fox " * 60}
    write_pairs(tmp_path / "pairs", [*PAIRS[:3], long, *PAIRS[4:]])
    spec = prepare_data(preference_job(tiny_config, tmp_path / "pairs"))
    with raises(DataError, "data.long_document", "pack.seq_len=48 holds 49", "pack.long_document=skip in"):
        samples(spec, seq(spec))
    skipping = prepare_data(
        preference_job(tiny_config, tmp_path / "pairs", {"pack.long_document": "skip"})
    )
    found = samples(skipping, seq(skipping))
    assert (len(found), found[-1].cursor.sources["pairs"].long_documents) == (59, 1)
    packer = ReferenceWindows(
        skipping.endless().chunks(Cursor(), "pairs"), SourceCursor(), skipping.settings
    )
    again = packer.samples(59 * seq(skipping), seq(skipping))
    assert again.input_ids.reshape(59, 2, -1).tolist() == [s.input_ids.tolist() for s in found]


def test_rows_that_fit_exactly_are_trained(tmp_path: Path, tiny_config: Make) -> None:
    write_pairs(tmp_path / "pairs", PAIRS)
    every = prepare_data(preference_job(tiny_config, tmp_path / "pairs"))
    rows = [row for pair in rows_of(samples(every, seq(every))) for row in pair]
    longest = max(sum(document >= 0 for document in documents) for _, _, documents in rows)
    fits = prepare_data(preference_job(tiny_config, tmp_path / "pairs", {"pack.seq_len": longest}))
    assert len(samples(fits, seq(fits))) == 60
    short = prepare_data(preference_job(tiny_config, tmp_path / "pairs", {"pack.seq_len": longest - 1}))
    with raises(DataError, "data.long_document"):
        samples(short, seq(short))


# ------------------------------------------------------------------------------------------ formats
def recorded_texts() -> list[dict[str, Any]]:
    return [{name: text.replace("\n", " ") for name, text in record.items()} for record in PAIRS[:9]]


def recorded_chats() -> list[dict[str, Any]]:
    return [of_chats([USER], [GOOD], [BAD]), of_chats([MORE, GOOD, USER], [BAD], [GOOD])]


def same_pairs(make: Make, folder: Path, form: str, records: str, **change: Any) -> None:
    """Asserts that the records give the same rows in this format as in lines."""
    write_pairs(folder / "jsonl", globals()[records](), num_files=1)
    source: dict[str, Any] = {"format": form}
    if form == "python":
        source["path"] = f"{__name__}:{records}"
    else:
        write_files(folder / form, form, [globals()[records]()])
    if form == "webdataset" and records == "recorded_chats":  # messages lie in a JSON member
        source |= {f"{name}_field": f"json.{name}" for name in ("prompt", "chosen", "rejected")}
    change |= {"data.shuffle": "none"}
    one = prepare_data(preference_job(make, folder / "jsonl", change))
    other = prepare_data(preference_job(make, folder / form, change, **source))
    found = rows_of(samples(other, seq(other)))
    assert found
    assert found == rows_of(samples(one, seq(one)))


@pytest.mark.parametrize(
    "form", ["csv", "tsv", "parquet", "arrow", "hf_dataset", "webdataset", "mds", "cbor", "python"]
)
def test_every_format_gives_the_same_pairs_of_texts(form: str, tmp_path: Path, tiny_config: Make) -> None:
    same_pairs(tiny_config, tmp_path, form, "recorded_texts")


@pytest.mark.parametrize("form", ["parquet", "arrow", "hf_dataset", "webdataset", "mds", "cbor", "python"])
def test_every_format_of_values_gives_the_same_pairs_of_messages(
    form: str, tmp_path: Path, tiny_config: Make
) -> None:
    name = saved(tmp_path / "t", byte_level(), CHATML)
    same_pairs(tiny_config, tmp_path, form, "recorded_chats", **{"data.tokenizer": name, "pack.seq_len": 120})


@pytest.mark.parametrize("form", ["lines", "text"])
def test_formats_of_texts_hold_no_pairs(form: str, tmp_path: Path, tiny_config: Make) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    with raises(ConfigError, "config.unsupported_content", "content is preference"):
        prepare_data(preference_job(tiny_config, tmp_path / "a.txt", format=form))


def test_a_column_that_holds_no_answer_is_refused_before_a_start(tmp_path: Path, tiny_config: Make) -> None:
    table = pa.table({"prompt": ["a"], "chosen": [1], "rejected": ["b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    config = preference_job(tiny_config, tmp_path / "a.parquet", format="parquet")
    with raises(ConfigError, "data.chat_value_type", "a text or a list of messages"):
        prepare_data(config)


# ------------------------------------------------------------------------------------------ transforms
def exchanged(document: dict[str, Any], seed: int) -> dict[str, Any] | None:
    """Takes the rejected answer for the chosen one, and drops prompts of `3`."""
    assert set(document) == {"prompt", "chosen", "rejected"}
    assert isinstance(seed, int)
    if str(document["prompt"]).startswith("3"):
        return None
    return {**document, "chosen": document["rejected"], "rejected": document["chosen"]}


def test_transforms_get_prompt_and_answers_and_return_pairs(tmp_path: Path, tiny_config: Make) -> None:
    write_pairs(tmp_path / "pairs", PAIRS)
    change = {"data.transforms": [f"{__name__}:exchanged"]}
    spec = small(prepare_data(preference_job(tiny_config, tmp_path / "pairs", change)))
    check_first_records(spec)
    kept = [record for record in PAIRS if not record["prompt"].startswith("3")]
    by_hand = [{**r, "chosen": r["rejected"], "rejected": r["chosen"]} for r in kept]
    write_pairs(tmp_path / "other", by_hand)
    other = small(prepare_data(preference_job(tiny_config, tmp_path / "other")))
    assert sorted(rows_of(samples(spec, seq(spec)))) == sorted(rows_of(samples(other, seq(other))))


# ------------------------------------------------------------------------------------------ configuration
TEXT = {"name": "text", "path": "x", "format": "jsonl"}


@pytest.mark.parametrize(
    ("overrides", "source", "code", "path"),
    [
        ({"pack.mode": "concat"}, {}, "config.conflict", "pack.mode"),
        ({"pack.mode": "bestfit"}, {}, "config.conflict", "pack.mode"),
        ({"pack.long_document": "split"}, {}, "config.conflict", "pack.mode"),
        ({"train.objective": "causal_lm"}, {}, "config.conflict", "train.objective"),
        ({}, {"loss": "all"}, "config.conflict", "data.sources"),
        ({}, {"chosen_field": "rejected"}, "config.duplicate_entry", "data.sources"),
        ({}, {"prompt_field": "chosen"}, "config.duplicate_entry", "data.sources"),
        ({}, {"content": "prompt", "prompt_field": None}, "config.conflict", "data.sources"),
        ({"eval.parts": {"p": {"sources": [TEXT]}}}, {}, "config.conflict", "eval.parts"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(
    overrides: dict[str, Any], source: dict[str, Any], code: str, path: str, tmp_path: Path, tiny_config: Make
) -> None:
    parse_config(preference_mapping(tiny_config, tmp_path))
    with raises(ConfigError, code, path):
        parse_config(preference_mapping(tiny_config, tmp_path, overrides, **source))


def test_pairs_are_not_mixed_with_other_contents(tmp_path: Path, tiny_config: Make) -> None:
    pair = {"name": "pairs", "path": "y", "format": "jsonl", "content": "preference"}
    for sources in ([pair, TEXT], [TEXT, pair]):
        with raises(ConfigError, "config.conflict", "data.sources", "text (text)"):
            parse_config(preference_mapping(tiny_config, tmp_path, {"data.sources": sources}))
    part = {"p": {"sources": [pair]}}
    with raises(ConfigError, "config.conflict", "eval.parts"):
        parse_config(tiny_config({"eval.parts": part, "eval.at_end": True}))


def test_lists_of_other_contents_keep_their_digest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b", "messages": []}\n')
    listing = list_files("s", str(tmp_path / "a.jsonl"), "jsonl")
    for kind in ("text", "chat", "prompt"):
        one, other = (
            freeze_listed("s", listing, "jsonl", Content(kind=kind, chosen_field=name)) for name in ("a", "b")
        )
        assert one.digest == other.digest
    pairs = [Content(kind="preference", chosen_field=name) for name in ("a", "b")]
    one, other = (freeze_listed("s", listing, "jsonl", content) for content in pairs)
    assert one.digest != other.digest
