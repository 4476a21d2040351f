"""Python values as Arrow arrays, compared with pyarrow's own conversion; and what a first sample imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.sources.lists.file_rows import arrow_array

whole = st.integers(-(2**63), 2**63 - 1)
KINDS = {
    pa.string(): st.text(st.characters(exclude_categories=["Cs"])),
    pa.int64(): whole,
    pa.list_(pa.int64()): st.lists(whole, max_size=4),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_they_are_the_arrays_that_pyarrow_makes(kind: pa.DataType) -> None:
    @given(st.lists(KINDS[kind], max_size=9))
    def same(values: list[object]) -> None:
        found = arrow_array(values, kind)
        found.validate(full=True)
        assert found.equals(pa.array(values, kind))
        assert found.to_pylist() == values

    same()


def test_the_first_sample_of_a_process_loads_neither_pandas_nor_awkward(corpus: Path) -> None:
    source = {"name": "stdlib", "path": str(corpus / "*.jsonl"), "format": "jsonl"}
    config = {
        "run": {"name": "first", "storage": str(corpus / "runs")},
        "data": {"sources": [source], "tokenizer": str(corpus / "tokenizer")},
        "pack": {"seq_len": 64},
        "train": {"global_batch_size": 1, "micro_batch_size": 1},
    }
    program = (
        "import sys, orchestrator\n"
        f"next(iter(orchestrator.open_stream({config!r})))\n"
        "print({'pandas', 'awkward', 'torch', 'ray'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()", "each takes half a CPU second or more"
