"""The encoders of a run's stream, built in a process as its documents ask for them.

It chooses none: which one makes which document, `planning.encoders` says.
"""

from __future__ import annotations

from orchestrator.data.tokens.encoder import Encoder
from orchestrator.data.tokens.masked import MaskedEncoder
from orchestrator.data.tokens.tokenizer_files import TokenizerModel
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan, Place, encoder_at


class Encoders:
    """The encoders that made a stream and make it on, each built when its first document comes."""

    def __init__(
        self, model: TokenizerModel, spans: tuple[EncoderSpan, ...], special_tokens_in_text: str
    ) -> None:
        self._model, self._spans, self._mode = model, spans, special_tokens_in_text
        self._built: dict[EncoderChoice, Encoder] = {}
        self._masked: dict[EncoderChoice, MaskedEncoder] = {}
        self._only: Encoder | None = None  # nearly every run has one: asked for with each document

    def at(self, source: str, place: Place) -> Encoder:
        """The one of the document there. Raises as `Encoder` does."""
        if self._only is not None:
            return self._only
        choice = encoder_at(self._spans, source, place)
        if choice not in self._built:
            self._built[choice] = Encoder(self._model, choice, self._mode)
            if len(self._spans) == 1:
                self._only = self._built[choice]
        return self._built[choice]

    @property
    def is_one(self) -> bool:
        """Whether all documents are encoded by the same."""
        return len(self._spans) == 1

    def masked(self, encoder: Encoder) -> MaskedEncoder:
        """What makes documents of several parts with `encoder`, one of these."""
        if encoder.choice not in self._masked:
            self._masked[encoder.choice] = MaskedEncoder(self._model, encoder, self._mode)
        return self._masked[encoder.choice]
