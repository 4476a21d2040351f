"""Which documents a step of the history was trained on: the document of `samples --json`.

It follows the stream as the audit does, from the nearest cursor in the journal on, and says whether that is
what the journal says was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from orchestrator.coordinator.attempt import Survey
from orchestrator.data.sources.compressed import COMPRESSED
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.line_numbers import line_numbers
from orchestrator.data.sources.manifest import Manifest
from orchestrator.data.spec import DataSpec
from orchestrator.errors import RefusedError
from orchestrator.history.step_names import find_steps, step_name
from orchestrator.monitor.audit import Walk
from orchestrator.monitor.tracing_packer import Stretch, TracingPacker
from orchestrator.records import Int32Array

_LINES = ("jsonl", "lines")  # formats with a record per line


def step_documents(spec: DataSpec, seen: Survey, step: str, text: bool) -> dict[str, Any]:
    """Of each sample of the step: `index`, `source`, `tokens`, and its `documents` in order.

    Each document has `file`, `unit` and `place` (byte or row), `line` (None where it is not counted:
    compressed files, rows), `epoch`, `first_token` and `end_token` within the document's tokens (the end is
    not included; None where they are not known), `begins` and `ends`: whether the stretch has the document's
    first and last token; with `text`, the stretch's tokens decoded. These are input tokens; the last label is
    the token after them. `matches`: the journal's digest of the step is that of these samples; `difference`
    says what is not so, and there may be no samples then.

    Raises `RefusedError` for a step that the history does not have, `DataIdentityError` if an attempt was
    told to go on with changed files and they differ.
    """
    if spec.settings.pack_mode != "concat":
        raise RefusedError(
            f"the documents of a sample are named for pack.mode=concat, this run has "
            f"pack.mode={spec.settings.pack_mode}; open_stream gives its samples, with document ids"
        )
    records = seen.lineage.records
    wanted = find_steps(records, step)
    if len(wanted) != 1:
        raise RefusedError(f"{step!r} names {len(wanted)} steps; name one, e.g. 250 or a2:250")
    (index,) = wanted
    walk = Walk(spec, seen, records, index, packer=TracingPacker)
    difference = next(walk.differences(wanted), None)
    name = step_name(records, index)
    found = list(_samples(spec, walk, text)) if difference is None or difference["step"] == name else []
    return {
        "step": name,
        "digest": records[index].digest,
        "matches": difference is None,
        "difference": difference and difference["reason"],
        "samples": found,
    }


def _samples(spec: DataSpec, walk: Walk, text: bool) -> Iterator[dict[str, Any]]:
    """Those of the step that was walked last."""
    step = walk.newest
    if step is None:
        return
    decode = _decoder(spec) if text else None
    passed = dict.fromkeys((source.name for source in spec.sources), 0)
    for number, (source, num_tokens) in enumerate(step.turns):
        packer = walk.packer(source)
        assert isinstance(packer, TracingPacker), "the walk was begun with it"
        stretches = packer.stretches(passed[source], passed[source] + num_tokens)
        passed[source] += num_tokens
        tokens = step.samples.input_ids[number]
        yield {
            "index": step.first_index + number,
            "source": source,
            "tokens": num_tokens,
            "documents": [
                _document(spec.plan_of(source, each.epoch).manifest, each, tokens, decode)
                for each in stretches
            ],
        }


def _document(
    manifest: Manifest,
    stretch: Stretch,
    tokens: Int32Array,
    decode: Callable[[Int32Array], str] | None,
) -> dict[str, Any]:
    first, num = stretch.first_token, stretch.num_tokens
    found: dict[str, Any] = {
        "file": manifest.path(stretch.file),
        "unit": format_of(manifest.format).unit,
        "place": stretch.place,
        "line": _line(manifest, stretch),
        "epoch": stretch.epoch,
        "tokens": num,
        "first_token": first,
        "end_token": None if first is None else first + num,
        "begins": stretch.begins,
        "ends": stretch.ends,
    }
    if decode is not None:
        found["text"] = decode(tokens[stretch.begin : stretch.begin + num])
    return found


def _line(manifest: Manifest, stretch: Stretch) -> int | None:
    row, path = manifest.files[stretch.file], manifest.path(stretch.file)
    if manifest.format not in _LINES or path.endswith(COMPRESSED):
        return None
    before = line_numbers(manifest.base, row.path, row.bytes, row.probe).newlines_before(stretch.place)
    return None if before is None else before + 1


def _decoder(spec: DataSpec) -> Callable[[Int32Array], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(spec.tokenizer.model_json)

    def decode(tokens: Int32Array) -> str:
        text: str = tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text

    return decode


def sample_rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each document of each sample, for a table."""
    for sample in found["samples"]:
        for number, document in enumerate(sample["documents"]):
            yield {"index": sample["index"], "source": sample["source"], "document": number, **document}
