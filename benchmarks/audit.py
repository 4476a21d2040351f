"""`python -m benchmarks.audit --json`: what the proof of a run costs beside the feed that it checks.

A corpus of installed Python sources (`--mb` of text; with `--document-chars` cut into documents of so many
characters) is taken through the feed once, from its first token to its last, in steps of `--batch` samples of
`--seq-len` tokens, and journalled without a model; with a cursor every `--cursor-tokens`, as by points.

`feed_cpu_s` is the CPU time of that: read, order, tokenize, pack, digest. `encode_cpu_s` is that
of the run's encoder alone, for the same documents' text. `audit_cpu_s` is that of `audit` over all steps in
this process, its modules loaded: the stream once more with the audit's own packer, and all files read whole
and tokenized again.
`audit_processes_cpu_s` is that of all processes of `audit --processes N`, their start included, and
`audit_processes_s` the time that passes. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import orchestrator
from benchmarks.common import SHAPE, Samples, medians, say
from benchmarks.data_corpus import VOCAB_SIZE, Corpus, make_corpus, some_lines
from benchmarks.made_run import note
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import Encoder
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange, StepRecord
from orchestrator.storage.files import Storage

_CALL_BYTES = 1 << 20  # of text in a call of the encoder, as the stream has them


def _job(corpus: Path, folder: Path, batch: int, seq_len: int) -> JobConfig:
    return parse_config(
        {
            "run": {"name": "audited", "storage": str(folder)},
            "data": {
                "sources": [{"name": "python", "path": str(corpus / "*.jsonl"), "format": "jsonl"}],
                "tokenizer": str(corpus / "tokenizer"),
            },
            "pack": {"seq_len": seq_len},
            "model": {
                "config": {
                    **SHAPE,
                    "vocab_size": VOCAB_SIZE,
                    "model_type": "llama",
                    "max_position_embeddings": seq_len,
                }
            },
            "train": {
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "lr": 1e-3,
                "schedule": "constant",
            },
        }  # fmt: skip
    )


def _begin(job: JobConfig) -> tuple[DataSpec, JournalWriter]:
    """A run of one attempt and one generation, before its first step."""
    folder = Path(job.run.storage) / job.run.name
    store, spec = RunStore(Storage(str(folder))), prepare_data(job, Storage(str(folder)))
    run_id = store.create_run(job.run.name, spec.identity()).id
    store.claim(1, "0" * 16, START, "here", run_id)
    store.write_parent(ClaimParent(attempt=1, parent=None))
    journal = JournalWriter(store.storage, 1, run_id=run_id)
    note(journal, EventKind.ATTEMPT, config=job.flat())
    journal.generation(
        GenerationStart(
            attempt=1, generation=1, parent=None, step=0, consumed_samples=0, consumed_tokens=0,
            target_tokens=0, world_size=1, global_batch_size=job.train.global_batch_size,
            seq_len=job.pack.seq_len,
        )
    )  # fmt: skip
    return spec, journal


def _feed(job: JobConfig, spec: DataSpec, journal: JournalWriter, cursor_tokens: int) -> int:
    """Takes every sample, and journals the steps and a cursor every so many tokens; the steps' number."""
    batch, seq_len = job.train.global_batch_size, job.pack.seq_len
    feed, cursor, step = InProcessFeed(spec), Cursor(), 0
    while True:
        asked = StepRange(
            first_sample=cursor.consumed_samples, num_samples=batch, num_tokens=batch * seq_len,
            seq_len=seq_len,
        )  # fmt: skip
        taken = feed.get(asked, 0, 1, batch, cursor)
        if not taken.step.num_samples:
            break
        due = taken.cursor.consumed_tokens // cursor_tokens > cursor.consumed_tokens // cursor_tokens
        step, cursor = step + 1, taken.cursor
        journal.step(
            StepRecord(
                attempt=1, generation=1, step=step, consumed_samples=cursor.consumed_samples,
                consumed_tokens=cursor.consumed_tokens, target_tokens=cursor.target_tokens, loss=1.0,
                grad_norm=1.0, lr=1e-3, digest=f"{taken.step_digest:016x}", step_s=1.0, data_wait_s=0.0,
                save_blocked_s=0.0,
            )
        )  # fmt: skip
        if due:
            journal.event(EventKind.CURSOR, cursor=encode(cursor))
        if taken.end_of_data:
            break
    feed.close()
    journal.close()
    return step


def _cut(corpus: Corpus, num_characters: int) -> None:
    """Into documents of so many characters at most."""
    for path in sorted(corpus.folder.glob("*.jsonl")):
        texts = (json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines())
        parts = (t[at : at + num_characters] for t in texts for at in range(0, len(t), num_characters))
        lines = "".join(json.dumps({"text": part}, ensure_ascii=False) + "\n" for part in parts)
        path.write_text(lines, encoding="utf-8")


def _encode(spec: DataSpec, texts: list[str]) -> int:
    """The tokens of these texts, by the run's encoder in calls of about so many bytes."""
    encoder = Encoder(spec.tokenizer, spec.encoders[0].encoder, spec.settings.special_tokens_in_text)
    num, held, size = 0, list[str](), 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= _CALL_BYTES:
            num, held, size = num + len(encoder.encode(held)[0]), [], 0
    return num + len(encoder.encode(held)[0])


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measure(corpus: Corpus, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        job = _job(corpus.folder, Path(folder), options.batch, options.seq_len)
        spec, journal = _begin(job)
        texts = some_lines(corpus, 1 << 62)
        _encode(spec, texts[:100])  # the tokenizer is loaded
        times = [time.process_time()]
        num_encoded = _encode(spec, texts)
        times.append(time.process_time())
        num_steps = _feed(job, spec, journal, options.cursor_tokens)
        times.append(time.process_time())
        run = orchestrator.open(Path(folder) / job.run.name)
        import_module("orchestrator.inspect.audit.audit")
        began_audit = time.process_time()
        report = run.audit(processes=1)
        audit_s = time.process_time() - began_audit
        here, others, began = _cpu_s(resource.RUSAGE_SELF), _cpu_s(resource.RUSAGE_CHILDREN), time.monotonic()
        again = run.audit(processes=options.processes)
        passed = time.monotonic() - began
        here, others = _cpu_s(resource.RUSAGE_SELF) - here, _cpu_s(resource.RUSAGE_CHILDREN) - others
    assert report["exactly_once"], report["first_difference"]
    assert (report["steps"], report["not_shown"]) == (num_steps, []), report
    assert again == report, "it does not depend on the number of processes"
    encode_s, feed_s = (after - before for before, after in zip(times, times[1:], strict=False))
    tokens = report["tokens"]
    return {
        "steps": num_steps,
        "documents": len(texts),
        "tokens": tokens,
        "encode_cpu_s": encode_s,
        "feed_cpu_s": feed_s,
        "audit_cpu_s": audit_s,
        "audit_processes_cpu_s": here + others,
        "audit_processes_s": passed,
        "encode_tokens_per_cpu_s": num_encoded / encode_s,
        "feed_tokens_per_cpu_s": tokens / feed_s,
        "audit_tokens_per_cpu_s": tokens / audit_s,
        "audit_processes_tokens_per_cpu_s": tokens / (here + others),
        "audit_to_encode": audit_s / encode_s,
        "audit_to_feed": audit_s / feed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--repeats", type=int, default=3, help="of each figure")
    parser.add_argument("--mb", type=int, default=128, help="MiB of text")
    parser.add_argument("--document-chars", type=int, default=0, help="cut documents; 0: as they are")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--cursor-tokens", type=int, default=1 << 22, help="between two cursors")
    parser.add_argument("--processes", type=int, default=2, help="of the audit in several")
    options = parser.parse_args()
    least = (options.repeats, options.mb, options.batch, options.seq_len, options.cursor_tokens)
    if min(*least, options.processes) < 1:
        parser.error("numbers are at least 1")
    samples: Samples = {}
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        corpus = make_corpus(Path(folder, "corpus"), options.mb << 20)
        if options.document_chars:
            _cut(corpus, options.document_chars)
        for repeat in range(options.repeats):
            for figure, value in measure(corpus, options).items():
                samples.setdefault(figure, []).append(value)
            say(f"repeat {repeat + 1}", samples)
    figures: dict[str, Any] = {"text_mb": round(corpus.num_bytes / 1e6, 1), **medians(samples)}
    figures |= {"cpus": os.cpu_count(), "load_before": load, "load_after": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
