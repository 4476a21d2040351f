"""The number and digest of the current document's earlier tokens, which a resume must reproduce."""

from __future__ import annotations

from copy import copy

from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.records.arrays import Int32Array
from orchestrator.records.cursor import SourceCursor


class UnfinishedDocument:
    """Follows a stream from `start` on.

    The tokens in earlier pieces of the document are known if the stream was opened in the document's first
    piece, or at a cursor that records them. Otherwise they are known from the next document on.
    """

    def __init__(self, start: SourceCursor) -> None:
        self._known = start.piece == 0 or bool(start.earlier_digest)
        self._hasher, self._num = token_hasher(), 0  # of the document's tokens passed so far
        self._earlier = (start.earlier_tokens, start.earlier_digest)

    def copy(self) -> UnfinishedDocument:
        """An independent copy."""
        new = copy(self)
        new._hasher = self._hasher.copy()
        return new

    @property
    def passed(self) -> tuple[int, str]:
        """Number and digest of the document's tokens passed so far."""
        return self._num, self._hasher.hexdigest()

    def add(self, tokens: Int32Array) -> None:
        """Passes more tokens of the same document."""
        add_tokens(self._hasher, tokens)
        self._num += len(tokens)

    def move(self, tokens: Int32Array, begin: int | None, piece: int, token: int) -> tuple[int, str]:
        """Passes `tokens`. The next token is number `token` of piece `piece`.

        The last document that begins among them or right after them begins at `begin` (None: there is none).
        Returns number and digest of the tokens in the document's earlier pieces: (0, "") in the first piece,
        and if they are not known.
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
