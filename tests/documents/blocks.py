"""The blocks of the documents, and terminals in which they run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
FENCE = re.compile(r"^((?:<!--.*?-->\n)*)```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# run by tests/documents/test_docs_alone.py, beside those on the Ray cluster: nothing in them needs one
ALONE = (
    "docs/howto/cards.md",
    "docs/howto/formats.md",
    "docs/howto/mix-sources.md",
    "docs/howto/own-loop.md",
    "docs/howto/transforms.md",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of a document, and what the comments before it say."""

    language: str
    text: str
    notes: tuple[str, ...]

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return next((note[8:].strip() for note in self.notes if note.startswith("not run:")), None)

    @property
    def exit_code(self) -> int:
        """How it must end."""
        return next((int(note[10:]) for note in self.notes if note.startswith("exit code ")), 0)

    @property
    def own_terminal(self) -> bool:
        """Whether it goes on while the next blocks run."""
        return "in a terminal of its own" in self.notes

    @property
    def once(self) -> str | None:
        """What the other terminal shows before it is run."""
        return next((note[13:].strip() for note in self.notes if note.startswith("once it says:")), None)


def blocks(path: Path) -> list[Block]:
    return [
        Block(
            language=language,
            text=text,
            notes=tuple(note.strip() for note in re.findall(r"<!--(.*?)-->", notes)),
        )
        for notes, language, text in FENCE.findall(path.read_text())
    ]


DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(path)]
NAMES = {path.relative_to(ROOT).as_posix(): path for path in DOCUMENTS}


class Terminal:
    """A shell, or Python, with all that it shows in a file; ended with the test."""

    def __init__(self, block: Block, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._block, self._words = block, words
        self._shown = folder / f".shown-{len(list(folder.glob('.shown-*')))}"
        with self._shown.open("wb") as file:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def text(self) -> str:
        return self._shown.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until it has shown `text`."""
        never = threading.Event()
        for _ in range(int(LIMIT_S / 0.05)):
            if text in self.text():
                return
            assert self._process.poll() is None, f"it has ended and never said {text!r}:\n{self.text()}"
            never.wait(0.05)
        raise AssertionError(f"it never said {text!r}:\n{self.text()}")

    def end(self) -> None:
        """Until it has ended, as the block says."""
        try:
            ended = self._process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._block.text}has not ended:\n{self.text()}") from None
        assert ended == self._block.exit_code, f"{self._block.text}ended with {ended}:\n{self.text()}"

    def close(self) -> None:
        """Whatever it still does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def started(warm: str, programs: Path, folder: Path, **more: str) -> Iterator[Any]:
    """What starts a block, with these variables; none is left afterwards."""
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}
    made: list[Terminal] = []

    def start(block: Block) -> Terminal:
        if block.language == "sh":
            words = ["bash", "-euo", "pipefail", "-c", block.text]
        else:
            script = folder / f".block-{len(made)}.py"
            script.write_text(block.text)
            words = [warm, "-X", "forked-with-ray", str(script)]
        made.append(Terminal(block, words, folder, environment))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()
