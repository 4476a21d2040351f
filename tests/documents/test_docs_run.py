"""Every ```sh and ```python block of README and docs/ is run: in order, in one folder per document.

The folder has `jobs/`, a small corpus that says it is the sample corpus, and the project's `configs/` as
tests/small_configs.py makes them; `cluster.address: null` joins the tests' Ray. A comment before a block says
what a reader sees from the text:

- `<!-- not run: REASON -->`: it cannot run here; `NOT_RUN` has all of these.
- `<!-- in a terminal of its own -->`: the blocks after it run meanwhile, until the next of its kind.
- `<!-- once it says: TEXT -->`: the block is run when that terminal has shown TEXT.
- `<!-- exit code N -->`: it ends so, not with 0.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents.blocks import ALONE, NAMES, Terminal, blocks, started

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]

# the run that how-tos begin with is made once: this block then finds a copy of it, done
COMMON_RUN = "orchestrator train configs/small.yaml train.max_steps=60\n"
# what the blocks that no test can run here begin with
NOT_RUN = {
    "README.md": ["make quickstart"],
    "docs/commands.md": ["orchestrator dashboard runs"],
    "docs/dashboard.md": ["orchestrator dashboard runs"],
    "docs/howto/clusters.md": [
        "export RAY_AUTH_MODE=token",
        "export RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1",
        "torchrun --nproc-per-node",
    ],
    "docs/howto/own-loop.md": ["import lightning", "import json\n\nimport orchestrator\nfrom torchtitan"],
    "docs/howto/spot-machines.md": ["orchestrator doctor runs", "#!/bin/bash\n#SBATCH"],
    "docs/storage.md": ["pip install -e '.[remote]'"],
    "docs/tutorial.md": ["python3 -m venv .venv"],
}


@pytest.mark.parametrize("name", NAMES)
def test_no_block_of_commands_escapes_the_reader(name: str) -> None:
    text = NAMES[name].read_text()
    fences = re.findall(r"^[ \t>]*```[ \t]*(?:sh|bash|shell|console|python|py)\b", text, re.MULTILINE)
    assert len(fences) == len(blocks(NAMES[name]))
    known = r"not run: .+|in a terminal of its own|once it says: .+|exit code \d+"
    unknown = [note for block in blocks(NAMES[name]) for note in block.notes if not re.fullmatch(known, note)]
    assert unknown == []


def test_the_blocks_that_are_not_run_are_those_of_the_list() -> None:
    for name, path in NAMES.items():
        marked = [block.text for block in blocks(path) if block.reason is not None]
        listed = NOT_RUN.get(name, [])
        assert len(marked) == len(listed), name
        assert all(text.startswith(words) for text, words in zip(marked, listed, strict=True)), name
    assert NOT_RUN.keys() <= NAMES.keys()


# ------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def common_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `runs/` of `COMMON_RUN` lies once it is made."""
    return tmp_path_factory.mktemp("common") / "runs"


@pytest.fixture
def shells(head: Any, warm: str, programs: Path, folder: Path) -> Iterator[Any]:
    """Starts a block; none is left afterwards."""
    with started(warm, programs, folder, RAY_ADDRESS=head.address) as start:
        yield start


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALONE])
@pytest.mark.quick("README.md", "docs/howto/migrate.md", "docs/howto/spot-machines.md")
def test_every_block_of_a_document_does_what_it_says(
    name: str, shells: Any, folder: Path, common_run: Path
) -> None:
    other: Terminal | None = None
    for block in blocks(NAMES[name]):
        if block.reason is not None:
            continue
        if block.text == COMMON_RUN and common_run.exists():
            shutil.copytree(common_run, folder / "runs")
        if block.once is not None:
            assert other is not None, f"{block.text}: there is no other terminal"
            other.wait_for(block.once)
        if block.own_terminal:
            if other is not None:
                other.end()
            other = shells(block)
        else:
            shells(block).end()
        if block.text == COMMON_RUN and not common_run.exists():
            shutil.copytree(folder / "runs", common_run)
    if other is not None:
        other.end()
