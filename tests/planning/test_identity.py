"""What may not change under a run, one row per way in which it does."""

import json
from dataclasses import replace

import pytest

from orchestrator.json_form import decode, encode
from orchestrator.planning.resume.identity import (
    FORMAT_VERSION,
    STREAM_SETTINGS,
    RunIdentity,
    compare,
    stream_settings,
)
from tests.planning.jobs import job

FLAT = job().flat()
FROZEN = RunIdentity(
    format_version=FORMAT_VERSION,
    order_version=1,
    tokenizer="./corpus/tokenizer",
    tokenizer_digest="aa11",
    encoder_name="gigatoken",
    encoder_version="0.3.1",
    settings=stream_settings(FLAT),
    manifests={"stdlib": "bb22", "web": "cc33"},
)


def settings_with(**changes):
    return {**FROZEN.settings, **{f"data.{name}": value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("change", "code", "both_values"),
    [
        ({"format_version": 2}, "resume.other_version", ("format 1", "format 2")),
        ({"order_version": 9}, "resume.other_version", ("version 1", "version 9")),
        ({"tokenizer_digest": "dd44"}, "resume.changed_tokenizer", ("aa11", "dd44")),
        ({"settings": settings_with(seed="1")}, "resume.changed_setting", ("data.seed=0", "asks for 1")),
        ({"manifests": {"stdlib": "ee55", "web": "cc33"}}, "data.changed_files", ("bb22", "ee55")),
        ({"manifests": {"stdlib": "bb22"}}, "resume.changed_sources", ("['stdlib', 'web']", "['stdlib']")),
    ],
)
def test_every_change_of_the_identity_is_refused_with_both_values_and_a_way_on(change, code, both_values):
    (refusal,) = compare(FROZEN, replace(FROZEN, **change))
    assert refusal.code == code
    assert all(value in refusal.text for value in both_values)
    assert ";" in refusal.text


def test_a_transform_whose_module_changed_is_refused_with_both_digests():
    old, new = (replace(FROZEN, transforms={"clean:text": digest}) for digest in ("1f1f", "2e2e"))
    (refusal,) = compare(old, new)
    assert refusal.code == "resume.changed_transform"
    assert all(value in refusal.text for value in ("clean:text", "1f1f", "2e2e"))


def test_the_same_identity_passes_and_so_does_another_name_of_the_same_tokenizer_and_another_encoder():
    assert compare(FROZEN, FROZEN) == ()
    assert compare(FROZEN, replace(FROZEN, encoder_name="tokenizers")) == ()
    assert compare(FROZEN, replace(FROZEN, tokenizer="elsewhere/tokenizer")) == ()


def test_changed_files_pass_on_request_and_nothing_else_does():
    changed = replace(FROZEN, manifests={"stdlib": "ee55", "web": "cc33"})
    assert compare(FROZEN, changed, accept_changed=True) == ()
    other = replace(changed, tokenizer_digest="dd44", manifests={"stdlib": "ee55"})
    assert len(compare(FROZEN, other, accept_changed=True)) == 2


def test_all_problems_are_told_at_once():
    worst = replace(FROZEN, order_version=2, tokenizer_digest="0", settings={}, manifests={})
    assert len(compare(FROZEN, worst)) == 3 + len(FROZEN.settings)


def test_every_setting_that_shapes_the_stream_is_in_the_identity():
    assert set(STREAM_SETTINGS) <= set(FROZEN.settings)
    assert FROZEN.settings["data.sources.stdlib.format"] == '"jsonl"'
    shaping = {name for name in FLAT if name.startswith(("data.", "pack."))}
    content_or_free = {
        *("data.sources", "data.tokenizer", "data.encoder", "data.num_epochs", "data.num_tokenizers"),
        *(
            "data.replay_bytes",
            "data.memory_bytes",
            "data.max_bad_share",
            "pack.max_long_share",
            "pack.seq_len",
            "data.on_end",
            "data.weight_by",
        ),
        *("data.refresh", "pack.document_attention"),
        *("data.transforms", "data.holdout"),  # in the identity of each source that has them
        "pack.long_document",  # it shapes the samples of bestfit and pad, and is in the identity of these
    }
    assert shaping - set(STREAM_SETTINGS) == content_or_free


def test_the_identity_survives_its_json():
    assert decode(RunIdentity, encode(FROZEN)) == FROZEN


def test_the_order_in_which_run_json_lists_the_sources_is_no_difference():
    several = replace(FROZEN, manifests={"web": "1" * 64, "books": "2" * 64})
    stored = json.loads(json.dumps(encode(several), sort_keys=True))
    assert list(stored["manifests"]) == ["books", "web"]
    assert compare(decode(RunIdentity, stored), several) == ()
    (refusal,) = compare(several, replace(several, manifests={"web": "1" * 64, "code": "2" * 64}))
    assert refusal.code == "resume.changed_sources"
    assert all(names in refusal.text for names in ("['books', 'web']", "['code', 'web']"))
