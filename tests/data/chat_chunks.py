"""Conversations as chunks of tokens, opened anywhere in a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.sources.records.content import Document
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.chunks import Encoders, tokenize_records
from orchestrator.data.tokens.tokenizer_files import examine, fetch
from orchestrator.records.tokens import TokenChunk, WindowTask
from tests.data.chats import CHATML_TAGGED, byte_level, saved
from tests.data.making import job, spec_of

Make = Callable[..., dict[str, Any]]


class Documents(OrderedWindow):
    """A window whose n-th record in the files is the n-th of `made`."""

    made: Sequence[Document] = ()

    def described(self, position: int) -> Document | None:
        return self.made[int(str(super().described(position)))]


def chat_spec(
    folder: Path, tiny_config: Make, made: Sequence[Document], template: str = CHATML_TAGGED, **data: Any
) -> DataSpec:
    name = saved(folder / "t", byte_level(), template)
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("".join(f"{i}\n" for i in range(len(made))))
    small = spec_of(job(tiny_config, folder / "data", "lines", tokenizer=name, **data))
    return replace(small, tokenizer=examine(name, fetch(name), chat=True).model)


def chunks(
    chat_spec: DataSpec, made: Sequence[Document], record: int = 0, piece: int = 0, output: int = 0
) -> list[TokenChunk]:
    plan, settings = chat_spec.plans[0], chat_spec.settings
    encoders = Encoders(chat_spec.tokenizer, chat_spec.encoders, settings.special_tokens_in_text)
    (window,) = read_windows(plan, settings, 0, 0)
    ordered = Documents(window, plan, settings, 0)
    ordered.made = made
    task = WindowTask(source=plan.source, epoch=0, block=0, record=record, piece=piece, output=output)
    return list(tokenize_records(task, window, ordered, plan, encoders, settings))


def entries(found: Sequence[TokenChunk]) -> list[tuple[int, int, int, list[int], list[bool]]]:
    """(record, piece, kind, tokens, which of them are targets) of each entry."""
    rows = []
    for chunk in found:
        loss = np.ones(len(chunk.tokens), np.bool_) if chunk.loss is None else chunk.loss
        assert len(loss) == len(chunk.tokens)
        ends = np.cumsum(chunk.num_tokens).tolist()
        for i, end in enumerate(ends):
            here = slice(end - int(chunk.num_tokens[i]), end)
            key = (int(chunk.record[i]), int(chunk.piece[i]), int(chunk.kind[i]))
            rows.append((*key, chunk.tokens[here].tolist(), loss[here].tolist()))
    return rows
