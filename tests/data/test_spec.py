"""What a run freezes of its data, and what it says when files or tokenizer are not those any more."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data import dataset, frozen
from orchestrator.data.dataset import prepare_data
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze, from_parquet, to_parquet
from orchestrator.data.tokens.encoder import Encoder
from orchestrator.errors import ConfigError, DataError, DataIdentityError
from orchestrator.planning.resume.identity import compare
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data.making import job, plain, samples, some_texts, write_corpus
from tests.raising import raises
from tests.storage.model_store import DELETE, Fate, ModelBucket, ModelStore

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    return tmp_path / "data"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def accepting(make: Make, folder: Path) -> JobConfig:
    config = job(make, folder).to_json()
    return parse_config({**config, "resume": {**config["resume"], "accept_changed": True}})


def test_a_first_start_freezes_files_tokenizer_and_encoder(data: Path, run: Path, tiny_config: Make) -> None:
    config = job(tiny_config, data)
    first = prepare_data(config, Storage(str(run)))
    assert sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()) == [
        "manifest/data.json",
        "manifest/made.parquet",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]
    again = prepare_data(config, Storage(str(run)))
    assert again == first
    assert again.tokenizer_folder == str(run / "tokenizer")
    assert again.vocab_size == 1000
    assert first.identity() == again.identity() == prepare_data(config).identity()


def test_a_spec_pickles_and_reads_the_same_samples(data: Path, run: Path, tiny_config: Make) -> None:
    spec = prepare_data(job(tiny_config, data), Storage(str(run)))
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert plain(samples(copy, 64)) == plain(samples(spec, 64))


def test_without_a_folder_nothing_is_written(data: Path, tmp_path: Path, tiny_config: Make) -> None:
    before = sorted(tmp_path.rglob("*"))
    samples(prepare_data(job(tiny_config, data)), 64)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_cut_off_first_start_left_is_replaced(data: Path, run: Path, tiny_config: Make) -> None:
    config = job(tiny_config, data)
    prepare_data(config, Storage(str(run)))
    (run / "manifest" / "data.json").unlink()
    (run / "manifest" / "made.parquet").write_bytes(b"torn")
    (run / "tokenizer" / "merges.txt").write_bytes(b"of another tokenizer")
    spec = prepare_data(config, Storage(str(run)))
    assert prepare_data(config, Storage(str(run))) == spec
    assert not (run / "tokenizer" / "merges.txt").exists()


def test_a_run_can_begin_where_nothing_can_be_deleted(data: Path, tiny_config: Make) -> None:
    def no_deletes(what: str, _: str) -> Fate:
        return Fate.REFUSED if what == DELETE else Fate.ANSWERED

    config = job(tiny_config, data)
    storage = Storage.on(ModelStore(ModelBucket(), turn=no_deletes))
    assert prepare_data(config, storage).identity() == prepare_data(config).identity()


def test_the_slower_of_two_first_starts_takes_what_the_quicker_one_froze(
    data: Path, run: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tiny_config, data)
    write, quicker = dataset.write_frozen, []

    def raced(storage: Storage, *arguments: Any) -> bool:
        if not quicker:
            quicker.append(None)
            quicker[0] = prepare_data(config, storage)
        return write(storage, *arguments)

    monkeypatch.setattr(dataset, "write_frozen", raced)
    assert prepare_data(config, Storage(str(run))) == quicker[0]


def test_copied_files_with_other_times_are_the_same(
    data: Path, run: Path, tiny_config: Make, tmp_path: Path
) -> None:
    spec = prepare_data(job(tiny_config, data), Storage(str(run)))
    for file in data.iterdir():
        os.utime(file, ns=(1, 1))
    assert plain(samples(prepare_data(job(tiny_config, data), Storage(str(run))), 64)) == plain(
        samples(spec, 64)
    )
    shutil.copytree(data, tmp_path / "moved")
    shutil.rmtree(data)
    moved = prepare_data(job(tiny_config, tmp_path / "moved"), Storage(str(run)))
    assert moved.identity().manifests == spec.identity().manifests
    assert samples(moved, 64)


def changed_content(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"text", b"txet", 1))


def grown(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b'\n{"text": "more"}\n')


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (changed_content, r"its ends had digest [0-9a-f]{16} and have [0-9a-f]{16}"),
        (grown, r"it had \d+ bytes and has \d+"),
    ],
)
def test_changed_files_are_refused_with_both_values(
    change: Callable[[Path], None], text: str, data: Path, run: Path, tiny_config: Make
) -> None:
    prepare_data(job(tiny_config, data), Storage(str(run)))
    change(data / "part-1.jsonl")
    with raises(
        DataIdentityError, "data.changed_files", "part-1.jsonl", "resume.accept_changed=true"
    ) as caught:
        prepare_data(job(tiny_config, data), Storage(str(run)))
    assert re.search(rf"part-1\.jsonl: {text}", str(caught.value))


@pytest.mark.parametrize("accepts", [False, True])
def test_a_missing_file_is_refused_and_cannot_be_accepted(
    accepts: bool, data: Path, run: Path, tiny_config: Make
) -> None:
    prepare_data(job(tiny_config, data), Storage(str(run)))
    grown(data / "part-2.jsonl")
    num_bytes = (data / "part-1.jsonl").stat().st_size
    (data / "part-1.jsonl").unlink()
    with raises(DataIdentityError, "data.missing_files", "part-1.jsonl", f"{num_bytes} bytes") as caught:
        prepare_data(accepting(tiny_config, data) if accepts else job(tiny_config, data), Storage(str(run)))
    assert "accept_changed" not in str(caught.value)
    assert ("part-2.jsonl" in str(caught.value)) is not accepts


@pytest.mark.parametrize("accepts", [False, True])
def test_a_parquet_file_that_has_lost_row_groups_is_refused_at_the_start_and_cannot_be_accepted(
    accepts: bool, run: Path, tiny_config: Make, tmp_path: Path
) -> None:
    folder, config = tmp_path / "groups", job(tiny_config, tmp_path / "groups", "parquet").to_json()
    config["resume"]["accept_changed"] = accepts
    write_corpus(folder, some_texts(60, lines=False), "parquet", 1)
    spec = prepare_data(parse_config(config), Storage(str(run)))
    write_corpus(folder, some_texts(40, lines=False), "parquet", 1)
    values = "part-0.parquet", "9 row groups", "has 6\n"
    with raises(DataIdentityError, "data.missing_files", *values) as caught:
        prepare_data(parse_config(config), Storage(str(run)))
    assert "accept_changed" not in str(caught.value)
    if accepts:  # more groups than the run reads can be accepted
        write_corpus(folder, some_texts(80, lines=False), "parquet", 1)
        assert prepare_data(parse_config(config), Storage(str(run))).plans == spec.plans


def check_path_refusal(make: Make, path: Path, run: Path, *values: str) -> None:
    with raises(DataIdentityError, "data.other_path", *values):
        prepare_data(accepting(make, path), Storage(str(run)))


def test_a_narrowed_path_is_refused_with_both_values(data: Path, run: Path, tiny_config: Make) -> None:
    prepare_data(job(tiny_config, data / "*.jsonl"), Storage(str(run)))
    for narrower, left_out in (
        ("part-[01].jsonl", "1 of these 3 files, e.g. part-2.jsonl"),
        ("part-1.jsonl", "2 of these 3 files, e.g. part-0.jsonl"),
    ):
        asked = f"3 files of path {data}/*.jsonl, ", f" {data}/{narrower}, "
        check_path_refusal(tiny_config, data / narrower, run, *asked, left_out)


def test_a_widened_path_is_refused_and_one_that_means_the_same_files_is_not(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data / "part-[01].jsonl"), Storage(str(run)))
    asked = f"2 files of path {data}/part-[01].jsonl, ", f" {data}, ", "1 file ", "part-2.jsonl"
    check_path_refusal(tiny_config, data, run, *asked)
    (data / "part-2.jsonl").unlink()
    assert prepare_data(job(tiny_config, data), Storage(str(run))).plans == spec.plans


def test_another_corpus_in_place_of_the_runs_own_is_told_first(
    data: Path, run: Path, tiny_config: Make, tmp_path: Path
) -> None:
    prepare_data(job(tiny_config, data), Storage(str(run)))
    write_corpus(tmp_path / "other", some_texts(31), "jsonl")
    values = "data.sources made", f" {data}, ", f" {tmp_path / 'other'}, "
    with raises(DataIdentityError, "data.changed_files", *values) as caught:
        prepare_data(job(tiny_config, tmp_path / "other"), Storage(str(run)))
    folders, _, files = str(caught.value).partition("\n")
    assert all(value in folders for value in values)
    assert f"{tmp_path / 'other'}/part-0.jsonl: " in files


def without_recorded_paths(run: Path) -> None:
    """As an older version wrote it."""
    record = json.loads((run / "manifest" / "data.json").read_text())
    del record["paths"]
    (run / "manifest" / "data.json").write_text(json.dumps(record))


def test_a_run_that_recorded_no_path_opens_and_refuses_a_narrower_one(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data), Storage(str(run)))
    without_recorded_paths(run)
    assert prepare_data(job(tiny_config, data), Storage(str(run))) == spec
    asked = f"3 files of path (not recorded, below {data}), ", f" {data}/part-0.jsonl, "
    check_path_refusal(tiny_config, data / "part-0.jsonl", run, *asked)


def test_a_run_that_was_started_with_a_file_twice_goes_on_so_and_says_it(
    data: Path, run: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "self").symlink_to(".")
    names = [f"{way}part-{i}.jsonl" for way in ("", "self/", "self/self/") for i in range(3)]
    with monkeypatch.context() as patch:  # as an older version listed
        every = replace(list_files("made", str(data), "jsonl"), names=tuple(names))
        patch.setattr(frozen, "list_files", lambda *_: every)
        old = prepare_data(job(tiny_config, data), Storage(str(run)))
    assert len(old.plans[0].manifest.files) == 9
    again = prepare_data(job(tiny_config, data), Storage(str(run)))
    assert again.plans == old.plans
    (note,) = (note for note in again.notes if note.startswith("warning"))
    assert "6 paths of source made that lead to files which it has under another path, too" in note
    check_path_refusal(tiny_config, data / "part-1.jsonl", run, "6 of these 9 files")


def test_changed_files_can_be_accepted_and_keep_their_frozen_places(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data), Storage(str(run)))
    before = plain(samples(spec, 64))
    grown(data / "part-1.jsonl")
    accepted = prepare_data(accepting(tiny_config, data), Storage(str(run)))
    assert accepted.plans == spec.plans
    assert any("going on with a changed file" in note for note in accepted.notes)
    old, new = spec.identity(), accepted.identity()
    assert old.manifests != new.manifests
    assert compare(old, new, accept_changed=True) == ()
    (refusal,) = compare(old, new)
    assert (refusal.code, "source made " in refusal.text) == ("data.changed_files", True)
    assert plain(samples(accepted, 64)) == before  # what was appended is not read


def test_files_that_came_later_are_not_read_and_that_is_said(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data), Storage(str(run)))
    (data / "later.jsonl").write_text('{"text": "later"}\n')
    again = prepare_data(job(tiny_config, data), Storage(str(run)))
    assert again.plans == spec.plans
    assert again.notes == (
        "1 file of source made came after its list was made and is not read, e.g. later.jsonl",
    )


def test_another_tokenizer_shows_in_the_identity_and_the_runs_own_copy_is_used(
    data: Path, run: Path, tiny_config: Make, tmp_path: Path, corpus: Path
) -> None:
    shutil.copytree(corpus / "tokenizer", tmp_path / "mine")
    config = job(tiny_config, data, tokenizer=str(tmp_path / "mine"))
    spec = prepare_data(config, Storage(str(run)))
    content = json.loads((tmp_path / "mine" / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "mine" / "tokenizer.json").write_text(json.dumps(content))
    again = prepare_data(config, Storage(str(run)))
    assert again.tokenizer == spec.tokenizer
    (refusal,) = compare(spec.identity(), again.identity())
    assert refusal.code == "resume.changed_tokenizer"
    shutil.rmtree(tmp_path / "mine")  # the copy is enough
    assert prepare_data(config, Storage(str(run))).identity() == spec.identity()


def test_a_damaged_copy_of_the_tokenizer_is_the_runs_and_not_the_jobs(
    data: Path, run: Path, tiny_config: Make
) -> None:
    prepare_data(job(tiny_config, data), Storage(str(run)))
    copy = run / "tokenizer" / "tokenizer.json"
    whole = copy.read_bytes()
    copy.write_bytes(whole[: len(whole) // 2])
    with raises(DataIdentityError, "data.frozen_damaged", run / "tokenizer") as caught:
        prepare_data(job(tiny_config, data), Storage(str(run)))
    assert "data.tokenizer" not in str(caught.value)


def test_a_file_in_place_of_a_tokenizers_folder_is_told_to_be_one(
    data: Path, corpus: Path, tiny_config: Make
) -> None:
    file = corpus / "tokenizer" / "tokenizer.json"
    with raises(ConfigError, "tokenizer.not_a_folder", f"data.tokenizer={file}:") as caught:
        prepare_data(job(tiny_config, data, tokenizer=str(file)))
    assert str(caught.value).endswith(f"data.tokenizer={file.parent}")


@pytest.mark.parametrize("file", ["manifest/made.parquet", "tokenizer/tokenizer.json"])
def test_a_damaged_or_lost_part_of_the_frozen_data_is_named(
    file: str, data: Path, run: Path, tiny_config: Make
) -> None:
    prepare_data(job(tiny_config, data), Storage(str(run)))
    whole = (run / file).read_bytes()
    (run / file).write_bytes(whole[: len(whole) // 2])
    code = "data.damaged_list" if file.endswith(".parquet") else "data.frozen_damaged"
    with raises(DataIdentityError, code, run):
        prepare_data(job(tiny_config, data), Storage(str(run)))
    (run / file).unlink()
    with raises(DataIdentityError, "data.frozen_gone", run):
        prepare_data(job(tiny_config, data), Storage(str(run)))


def test_another_whole_part_in_place_of_a_frozen_one_is_refused_with_both_digests(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data), Storage(str(run)))
    listed, tokenizer = (run / name for name in ("manifest/made.parquet", "tokenizer/tokenizer.json"))
    whole, other = listed.read_bytes(), freeze("made", str(data / "part-[01].jsonl"), "jsonl", "text")
    listed.write_bytes(to_parquet(other))
    was, now = spec.plans[0].manifest.digest, other.digest
    with raises(DataIdentityError, "data.damaged_list", "made.parquet", was, now):
        prepare_data(job(tiny_config, data), Storage(str(run)))
    listed.write_bytes(whole)
    content = json.loads(tokenizer.read_text())
    content["model"]["merges"].pop()
    tokenizer.write_text(json.dumps(content))
    was = spec.identity().tokenizer_digest
    with raises(DataIdentityError, "data.frozen_damaged", f" {was} ") as caught:
        prepare_data(job(tiny_config, data), Storage(str(run)))
    assert len(set(re.findall(r"[0-9a-f]{64}", str(caught.value)))) == 2


def test_a_program_that_would_cut_other_blocks_is_refused_with_both_numbers(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data, window_bytes=9000), Storage(str(run)))
    num = spec.plans[0].fragments_per_block
    assert num > 1
    record = json.loads((run / "manifest" / "data.json").read_text())
    record["fragments_per_block"]["made"] = num + 1  # as another program would have frozen it
    (run / "manifest" / "data.json").write_text(json.dumps(record))
    with raises(DataIdentityError, "resume.other_version", f" {num + 1} fragments", f" {num};"):
        prepare_data(job(tiny_config, data, window_bytes=9000), Storage(str(run)))


def test_the_encoders_are_compared_on_the_runs_own_documents(
    data: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "own.jsonl").write_text('{"text": "a document of this run alone"}\n' * 40)
    right = Encoder.encode

    def wrong(self: Encoder, texts: list[str]) -> Any:
        ids, lengths = right(self, texts)
        return (ids + 1 if any("of this run alone" in text for text in texts) else ids), lengths

    monkeypatch.setattr(Encoder, "encode", wrong)
    spec = prepare_data(job(tiny_config, data, window_bytes=1 << 20))
    assert spec.encoders[0].encoder.name == "tokenizers"
    (note,) = (note for note in spec.notes if note.startswith("encoding with tokenizers"))
    assert "not with gigatoken" in note


def test_the_first_encoder_stays_whatever_is_asked_for(data: Path, run: Path, tiny_config: Make) -> None:
    first = prepare_data(job(tiny_config, data, encoder="tokenizers"), Storage(str(run)))
    assert first.encoders[0].encoder.name == "tokenizers"
    for wanted in ("auto", "gigatoken", "tokenizers"):
        again = prepare_data(job(tiny_config, data, encoder=wanted), Storage(str(run)))
        assert (again.encoders, again.identity()) == (first.encoders, first.identity())


def test_sizes_that_shape_the_order_show_in_the_identity(data: Path, run: Path, tiny_config: Make) -> None:
    first = prepare_data(job(tiny_config, data), Storage(str(run)))
    other = prepare_data(job(tiny_config, data, window_bytes=5000), Storage(str(run)))
    refusals = compare(first.identity(), other.identity())
    assert any("data.window_bytes=2500" in refusal.text for refusal in refusals)


@pytest.mark.parametrize("path", ["nothing/*.jsonl", "nothing", "data/*.parquet", "data/part-9.jsonl"])
def test_no_files_is_an_error_that_names_pattern_and_folder(
    path: str, data: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    with raises(ConfigError, "data.no_matching_file", repr(path), data.parent):
        prepare_data(job(tiny_config, Path(path)))


def test_relative_paths_mean_the_same_in_another_process(
    data: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(data.parent)
    spec = prepare_data(job(tiny_config, Path("data")))
    monkeypatch.chdir("/")
    assert samples(spec, 64)


def test_files_without_any_token_stop_with_a_reason(tmp_path: Path, tiny_config: Make) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n\n")
    spec = prepare_data(job(tiny_config, tmp_path))
    values = ("epoch 0", "source made", "0 tokens")
    with raises(DataError, "data.nothing_to_train", *values):
        samples(spec, 8)
    endless = prepare_data(job(tiny_config, tmp_path, num_epochs=None))
    with raises(DataError, "data.nothing_to_train", *values):
        samples(endless, 8)


def test_a_parquet_column_that_is_missing_or_no_text_is_a_config_error(
    tmp_path: Path, tiny_config: Make
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": [1], "text": [2]}), tmp_path / "a.parquet")
    with raises(ConfigError, "data.field_type", "'text'", "int64"):
        prepare_data(job(tiny_config, tmp_path, "parquet"))
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with raises(ConfigError, "data.missing_field", "a.parquet", "`text`", "has: n", "text_field"):
        prepare_data(job(tiny_config, tmp_path, "parquet"))


def test_folders_are_read_below_hidden_files_are_not_and_the_order_is_by_bytes(tmp_path: Path) -> None:
    for name in (
        "b/x.jsonl",
        "b.jsonl",
        "a/y.jsonl.gz",
        "B.jsonl",
        "é.jsonl",
        ".hidden.jsonl",
        ".d/z.jsonl",
        "c.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = [row.path for row in freeze("s", str(tmp_path), "jsonl", "text").files]
    assert names == ["B.jsonl", "a/y.jsonl.gz", "b.jsonl", "b/x.jsonl", "é.jsonl"]
    globbed = freeze("s", str(tmp_path / "**" / "*.jsonl"), "jsonl", "text")
    assert (globbed.base, len(globbed.files)) == (str(tmp_path), 4)
    assert freeze("s", str(tmp_path), "text", "text").files[-2].path == "c.txt"


def test_a_manifest_is_the_same_after_storage_and_an_altered_one_is_refused(data: Path) -> None:
    manifest = freeze("s", str(data), "jsonl", "text")
    stored = to_parquet(manifest)
    assert from_parquet(stored, "here") == manifest
    other = to_parquet(freeze("s", str(data / "part-0.jsonl"), "jsonl", "text"))
    import io

    import pyarrow.parquet as pq

    table = (
        pq.read_table(io.BytesIO(stored))
        .slice(1)
        .replace_schema_metadata(pq.read_schema(io.BytesIO(stored)).metadata)
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    with raises(DataIdentityError, "data.damaged_list", "here: ", manifest.digest):
        from_parquet(sink.getvalue(), "here")
    assert from_parquet(other, "here") != manifest


def test_sources_with_large_compressed_files_say_what_that_means(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path, some_texts(120), "jsonl.gz", 1)
    (note,) = prepare_data(job(tiny_config, tmp_path)).notes
    assert note.startswith("1 of 1 files of source made are compressed")
    assert "shuffled within windows of that size only" in note
    assert samples(prepare_data(job(tiny_config, tmp_path)), 64, Cursor())


def test_compressed_files_that_are_large_together_say_so_too(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path, some_texts(60), "jsonl.gz", 6)
    largest = max(file.stat().st_size for file in tmp_path.iterdir())
    together = prepare_data(job(tiny_config, tmp_path, window_bytes=4 * largest + 4))
    assert together.plans[0].fragments_per_block > 1
    (note,) = together.notes
    assert note.startswith("6 of 6 files of source made are compressed, or have row groups, in blocks that")
    assert prepare_data(job(tiny_config, tmp_path, window_bytes=1 << 30)).notes == ()


def test_two_columns_of_the_text_fields_name_are_refused_by_name(tmp_path: Path) -> None:
    table = pa.table([pa.array(["1"]), pa.array(["2"]), pa.array([3])], names=["text", "text", "n"])
    pq.write_table(table, tmp_path / "a.parquet")
    with raises(ConfigError, "data.ambiguous_field", "a.parquet", "2 columns", "'text'"):
        freeze("s", str(tmp_path), "parquet", "text")
