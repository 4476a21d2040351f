"""The earlier tokens of the document at hand, as their number and digest: what a resume has to reproduce.

It knows no chunk and no file; the packer says which tokens are passed and where documents begin.
"""

from __future__ import annotations

from copy import copy

from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.records.arrays import Int32Array
from orchestrator.records.cursor import SourceCursor


class UnfinishedDocument:
    """Follows a stream from `start` on. What lies in the pieces before the one at hand is known if the stream
    was opened in a document's first piece, or at a cursor that has it; else from the next document on.
    """

    def __init__(self, start: SourceCursor) -> None:
        self._known = start.piece == 0 or bool(start.earlier_digest)
        self._hasher, self._num = token_hasher(), 0  # of the document's tokens passed so far
        self._earlier = (start.earlier_tokens, start.earlier_digest)

    def copy(self) -> UnfinishedDocument:
        """Another one at the same place."""
        new = copy(self)
        new._hasher = self._hasher.copy()
        return new

    @property
    def passed(self) -> tuple[int, str]:
        """Number and digest of the document's tokens passed so far."""
        return self._num, self._hasher.hexdigest()

    def add(self, tokens: Int32Array) -> None:
        """More tokens of the same document are passed."""
        add_tokens(self._hasher, tokens)
        self._num += len(tokens)

    def move(self, tokens: Int32Array, begin: int | None, piece: int, token: int) -> tuple[int, str]:
        """`tokens` are passed; the last document that begins among them or right after them does so at
        `begin` (None: there is none). The next token is number `token` of piece `piece`.

        Returns number and digest of the tokens in the document's earlier pieces: (0, "") in the first piece,
        and where they are not known.
        """
        if begin is not None:
            self._known, self._hasher, self._num = True, token_hasher(), 0
            tokens = tokens[begin:]
        before_piece = len(tokens) - token
        if before_piece >= 0:  # the piece begins here
            self.add(tokens[:before_piece])
            self._earlier = self.passed
            tokens = tokens[before_piece:]
        self.add(tokens)
        return self._earlier if piece and self._known else (0, "")
