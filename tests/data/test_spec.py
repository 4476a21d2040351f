"""What a run freezes of its data, and what it says when files or tokenizer are not those any more."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import JobConfig, parse_config
from orchestrator.data import spec as spec_module
from orchestrator.data.manifest import freeze, from_parquet, to_parquet
from orchestrator.data.spec import prepare_data
from orchestrator.errors import ConfigError, DataError, DataIdentityError
from orchestrator.plan.identity import compare
from orchestrator.records import Cursor
from tests.data.making import job, plain, samples, some_texts, write_corpus

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
    first = prepare_data(config, run)
    assert sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()) == [
        "manifest/data.json",
        "manifest/made.parquet",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]
    again = prepare_data(config, run)
    assert again == first
    assert again.tokenizer_folder == str(run / "tokenizer")
    assert again.vocab_size == 1000
    assert first.identity() == again.identity() == prepare_data(config).identity()


def test_a_spec_pickles_and_reads_the_same_samples(data: Path, run: Path, tiny_config: Make) -> None:
    spec = prepare_data(job(tiny_config, data), run)
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert plain(samples(copy, 64)) == plain(samples(spec, 64))


def test_without_a_folder_nothing_is_written(data: Path, tmp_path: Path, tiny_config: Make) -> None:
    before = sorted(tmp_path.rglob("*"))
    samples(prepare_data(job(tiny_config, data)), 64)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_cut_off_first_start_left_is_replaced(data: Path, run: Path, tiny_config: Make) -> None:
    config = job(tiny_config, data)
    prepare_data(config, run)
    (run / "manifest" / "data.json").unlink()
    (run / "manifest" / "made.parquet").write_bytes(b"torn")
    (run / "tokenizer" / "merges.txt").write_bytes(b"of another tokenizer")
    spec = prepare_data(config, run)
    assert prepare_data(config, run) == spec
    assert not (run / "tokenizer" / "merges.txt").exists()


def test_the_slower_of_two_first_starts_takes_what_the_quicker_one_froze(
    data: Path, run: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tiny_config, data)
    write, quicker = spec_module.write_frozen, []

    def raced(folder: Path, *arguments: Any) -> bool:
        if not quicker:
            quicker.append(None)
            quicker[0] = prepare_data(config, folder)
        return write(folder, *arguments)

    monkeypatch.setattr(spec_module, "write_frozen", raced)
    assert prepare_data(config, run) == quicker[0]


def test_copied_files_with_other_times_are_the_same(
    data: Path, run: Path, tiny_config: Make, tmp_path: Path
) -> None:
    spec = prepare_data(job(tiny_config, data), run)
    for file in data.iterdir():
        os.utime(file, ns=(1, 1))
    assert plain(samples(prepare_data(job(tiny_config, data), run), 64)) == plain(samples(spec, 64))
    shutil.copytree(data, tmp_path / "moved")
    shutil.rmtree(data)
    moved = prepare_data(job(tiny_config, tmp_path / "moved"), run)
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
        (Path.unlink, r"it had \d+ bytes and is gone"),
    ],
)
def test_changed_files_are_refused_with_both_values(
    change: Callable[[Path], None], text: str, data: Path, run: Path, tiny_config: Make
) -> None:
    prepare_data(job(tiny_config, data), run)
    change(data / "part-1.jsonl")
    with pytest.raises(DataIdentityError, match=rf"part-1\.jsonl: {text}[\s\S]*resume\.accept_changed=true"):
        prepare_data(job(tiny_config, data), run)


def test_changed_files_can_be_accepted_and_keep_their_frozen_places(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data), run)
    before = plain(samples(spec, 64))
    grown(data / "part-1.jsonl")
    accepted = prepare_data(accepting(tiny_config, data), run)
    assert accepted.plans == spec.plans
    assert any("going on with a changed file" in note for note in accepted.notes)
    old, new = spec.identity(), accepted.identity()
    assert old.manifests != new.manifests
    assert compare(old, new, accept_changed=True) == ()
    assert "the files of source made have changed" in compare(old, new)[0]
    assert plain(samples(accepted, 64)) == before  # what was appended is not read


def test_files_that_came_later_are_not_read_and_that_is_said(
    data: Path, run: Path, tiny_config: Make
) -> None:
    spec = prepare_data(job(tiny_config, data), run)
    (data / "later.jsonl").write_text('{"text": "later"}\n')
    again = prepare_data(job(tiny_config, data), run)
    assert again.plans == spec.plans
    assert again.notes == (
        "1 files of source made came after the run's start and are not read, e.g. later.jsonl",
    )


def test_another_tokenizer_shows_in_the_identity_and_the_runs_own_copy_is_used(
    data: Path, run: Path, tiny_config: Make, tmp_path: Path, corpus: Path
) -> None:
    shutil.copytree(corpus / "tokenizer", tmp_path / "mine")
    config = job(tiny_config, data, tokenizer=str(tmp_path / "mine"))
    spec = prepare_data(config, run)
    content = json.loads((tmp_path / "mine" / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "mine" / "tokenizer.json").write_text(json.dumps(content))
    again = prepare_data(config, run)
    assert again.tokenizer == spec.tokenizer
    (refusal,) = compare(spec.identity(), again.identity())
    assert "the run was started with tokenizer" in refusal
    shutil.rmtree(tmp_path / "mine")  # the copy is enough
    assert prepare_data(config, run).identity() == spec.identity()


@pytest.mark.parametrize("file", ["manifest/made.parquet", "tokenizer/tokenizer.json"])
def test_a_damaged_or_lost_part_of_the_frozen_data_is_named(
    file: str, data: Path, run: Path, tiny_config: Make
) -> None:
    prepare_data(job(tiny_config, data), run)
    whole = (run / file).read_bytes()
    (run / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises((DataIdentityError, ConfigError), match="restore|replace"):
        prepare_data(job(tiny_config, data), run)
    (run / file).unlink()
    with pytest.raises(DataIdentityError, match="restore"):
        prepare_data(job(tiny_config, data), run)


def test_the_first_encoder_stays_whatever_is_asked_for(data: Path, run: Path, tiny_config: Make) -> None:
    first = prepare_data(job(tiny_config, data, encoder="tokenizers"), run)
    assert first.encoders[0].encoder.name == "tokenizers"
    for wanted in ("auto", "gigatoken", "tokenizers"):
        again = prepare_data(job(tiny_config, data, encoder=wanted), run)
        assert (again.encoders, again.identity()) == (first.encoders, first.identity())


def test_sizes_that_shape_the_order_show_in_the_identity(data: Path, run: Path, tiny_config: Make) -> None:
    first = prepare_data(job(tiny_config, data), run)
    other = prepare_data(job(tiny_config, data, window_bytes=5000), run)
    assert any("data.window_bytes=2500" in text for text in compare(first.identity(), other.identity()))


@pytest.mark.parametrize("path", ["nothing/*.jsonl", "nothing", "data/*.parquet", "data/part-9.jsonl"])
def test_no_files_is_an_error_that_names_pattern_and_folder(
    path: str, data: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    with pytest.raises(ConfigError) as caught:
        prepare_data(job(tiny_config, Path(path)))
    assert repr(path) in str(caught.value)
    assert str(data.parent) in str(caught.value)


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
    with pytest.raises(DataError, match="epoch 0 of source made has 0 tokens, 2 are the least"):
        samples(spec, 8)
    endless = prepare_data(job(tiny_config, tmp_path, num_epochs=None))
    with pytest.raises(DataError, match="2 are the least"):
        samples(endless, 8)


def test_a_parquet_column_that_is_missing_or_no_text_is_a_config_error(
    tmp_path: Path, tiny_config: Make
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": [1], "text": [2]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="column 'text' is int64, text is expected"):
        prepare_data(job(tiny_config, tmp_path, "parquet"))
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: no field `text`; it has: n\. Set text_field"):
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
    with pytest.raises(DataIdentityError, match="here: the run's manifest was written with digest"):
        from_parquet(sink.getvalue(), "here")
    assert from_parquet(other, "here") != manifest


def test_sources_with_large_compressed_files_say_what_that_means(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path, some_texts(120), "jsonl.gz", 1)
    (note,) = prepare_data(job(tiny_config, tmp_path)).notes
    assert note.startswith("1 of 1 files of source made are compressed")
    assert "shuffled within windows of that size only" in note
    assert samples(prepare_data(job(tiny_config, tmp_path)), 64, Cursor())
