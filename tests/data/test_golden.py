"""Golden vectors of order, packing and digest: a stream that was trained must come out the same for ever.

If one of these fails, runs that exist cannot be continued: raise the version that names what changed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.data.packing.packer import Run
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.sources.lists.file_rows import FileRow
from orchestrator.data.sources.lists.manifest import Files, Manifest, freeze
from orchestrator.data.sources.records.content import Content
from orchestrator.data.spec import DataSpec
from orchestrator.planning import order
from orchestrator.planning.digest import batch_digest, sample_digest, token_hasher
from orchestrator.planning.order import ORDER_VERSION, block_at, window_order
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StepRange
from tests.data.making import job, samples, spec_of

Make = Callable[..., dict[str, Any]]


BLOCKS = [5, 4, 9, 6, 1, 2, 0, 7, 8, 3]
RECORDS = [3, 6, 4, 2, 7, 5, 0, 1]
HELD_OUT = [0, 1, 36, 43, 48, 53]
SEEDS = (0x53286B8F3B633E30, 0xCF7096926B02236)
SAMPLE_DIGEST = 0x992EF2E732D3F638
STEP_DIGEST = 0xC1702674829709B2
MANIFEST = "a0148bdd18fded892fe5002464158603c95c791bdbcd7beec3233fa07dd71bff"
NUM_SAMPLES = 31
DIGESTS = (0x533F53D37CCF02E1, 0x130C503A75E2AACD, 0xD849EFD5D8ACEF36)  # of samples 0 and 17, of all
CURSOR = Cursor(  # behind sample 17
    consumed_samples=18,
    consumed_tokens=1152,
    target_tokens=1152,
    sources={
        "made": SourceCursor(
            epoch=1, record=7, token=11, prefix_digest="f88393762aeebaa3", documents=38, empty_documents=9
        )
    },
)


def test_the_order_of_blocks_and_records() -> None:
    assert ORDER_VERSION == 1
    assert [block_at(7, "web", 0, p, 10, "block") for p in range(10)] == BLOCKS
    assert window_order([(0, 0, 4), (1, 0, 4)], 7, "web", 2, "block").tolist() == RECORDS


def test_what_is_held_out_and_the_seeds_of_records() -> None:
    assert order.RECORD_VERSION == 1
    key, bound = order.holdout_key("web", "a/b.jsonl"), order.holdout_bound(0.1)
    assert [place for place in range(60) if order.is_held_out(place, key, bound)] == HELD_OUT
    seed = order.record_seed(77, order.transform_key(7, "web", 2, "a/b.jsonl"))
    assert (seed, order.document_seed(9, 1, 2)) == SEEDS


def test_the_digest_of_a_sample() -> None:
    ids, labels, documents = (np.array(a, np.int32) for a in ([5, 6, 0], [6, 7, -100], [0, 1, -1]))
    assert sample_digest(12345678901, 0, 3, ids, labels, documents) == SAMPLE_DIGEST
    table = [np.stack([a, a]) for a in (ids, labels, documents)]
    two = batch_digest(12345678901, np.zeros(2, np.int32), *table)
    assert two == (SAMPLE_DIGEST + sample_digest(12345678902, 0, 3, ids, labels, documents)) % 2**64
    assert token_hasher(ids).hexdigest() == "9681b404a81fce5d"
    layout = struct.pack("<QQQ9i", 12345678901, 0, 3, 5, 6, 0, 6, 7, -100, 0, 1, -1)
    assert xxhash.xxh3_64_intdigest(layout) == SAMPLE_DIGEST
    assert sample_digest(12345678901, 1, 3, ids, labels, documents) != SAMPLE_DIGEST


def test_the_digest_does_not_depend_on_how_an_array_lies_in_memory() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    turned = np.asfortranarray(table)
    expected = sample_digest(0, 0, 4, table[1], table[1], table[1])
    assert sample_digest(0, 0, 4, turned[1], turned[1].astype(">i4"), table[1]) == expected


@pytest.fixture
def spec(tmp_path: Path, tiny_config: Make) -> DataSpec:
    """40 numbered documents; the tokenizer has a token per byte, so that no training decides the ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<eos>"])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (tmp_path / "data").mkdir()
    for part in range(2):
        lines = [json.dumps({"text": f"document {i} " * (i % 5)}) + "\n" for i in range(part, 40, 2)]
        (tmp_path / "data" / f"{part}.jsonl").write_text("".join(lines))
    tokenizer_folder = str(tmp_path / "tokenizer")
    return spec_of(job(tiny_config, tmp_path / "data", tokenizer=tokenizer_folder, num_epochs=2, seed=3))


def test_the_packing_of_a_small_corpus(spec: DataSpec) -> None:
    found = samples(spec, 64)
    digests = [sample_digest(s.index, 0, 64, s.input_ids, s.labels, s.document_ids) for s in found]
    assert len(found) == NUM_SAMPLES
    assert (digests[0], digests[17], sum(digests) % 2**64) == DIGESTS
    assert found[17].cursor == CURSOR


def test_the_frozen_list_of_its_files(spec: DataSpec, tmp_path: Path) -> None:
    manifest = freeze("made", str(tmp_path / "data"), "jsonl", "text")
    assert manifest.digest == MANIFEST
    assert spec.plans[0].manifest == manifest
    assert (spec.plans[0].num_fragments, spec.plans[0].fragments_per_block) == (2, 1)


def test_the_layout_of_a_drawn_step() -> None:
    step = StepRange(first_sample=3, num_samples=2, num_tokens=5, seq_len=3)
    tokens, starts = np.array([10, 11, 12, 13, 14, 15], np.int32), np.array([2, 4], np.int64)
    run = Run(tokens=tokens, document_starts=starts)
    drawn = StepSamples(step, {0: run}, np.zeros(2, np.int32), Cursor(), True, ())
    batch = drawn.slice(3, 5)
    assert batch.input_ids.tolist() == [[10, 11, 12], [13, 14, 0]]
    assert batch.labels.tolist() == [[11, 12, 13], [14, 15, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 1], [0, 1, -1]]
    assert drawn.digest == STEP_DIGEST


def test_the_digest_of_a_manifest() -> None:
    row = FileRow(path="a", bytes=3, mtime_ns=4, probe="ab", group_rows=(1, 2), group_bytes=(3, 4))
    of_text = Manifest(
        source="web", base="/e", format="parquet", content=Content(text_field="body"), files=Files.of([row])
    )
    assert of_text.digest == "9a6eb99dc73c379270c2c55a06162889adc67da2f3a69470ebaee45d0117db3e"
    assert replace(of_text, content=Content(kind="chat")).digest not in (of_text.digest, "")
