"""The identity that tests give a run."""

from __future__ import annotations

from orchestrator.planning.resume.identity import RunIdentity, stream_settings
from tests.planning.jobs import job

BEFORE = job()
IDENTITY = RunIdentity(
    format_version=1,
    order_version=1,
    tokenizer="./corpus/tokenizer",
    tokenizer_digest="aa11",
    encoder_name="gigatoken",
    encoder_version="0.3.1",
    settings=stream_settings(BEFORE.flat()),
    manifests={"stdlib": "bb22"},
)
