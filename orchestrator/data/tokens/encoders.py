"""The encoders of a run's stream, each built in a process when a document needs it.

`planning.encoders` determines the encoder of each document.
"""

from __future__ import annotations

from orchestrator.data.tokens.encoder import Encoder
from orchestrator.data.tokens.loss_mask import MaskedEncoder
from orchestrator.data.tokens.tokenizer_files import TokenizerModel
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan, Place, encoder_at


class Encoders:
    """The encoders of a stream's past and future documents, each built for its first document."""

    def __init__(
        self, model: TokenizerModel, spans: tuple[EncoderSpan, ...], special_tokens_in_text: str
    ) -> None:
        self._model, self._spans, self._mode = model, spans, special_tokens_in_text
        self._built: dict[EncoderChoice, Encoder] = {}
        self._masked: dict[EncoderChoice, MaskedEncoder] = {}
        self._only: Encoder | None = None  # most runs have one; it is used for each document

    def at(self, source: str, place: Place) -> Encoder:
        """The encoder of the document at `place`. Raises as `Encoder`."""
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
        """Whether all documents have the same encoder."""
        return len(self._spans) == 1

    def masked(self, encoder: Encoder) -> MaskedEncoder:
        """The encoder of documents with several parts, built on `encoder`, which must be one of these."""
        if encoder.choice not in self._masked:
            self._masked[encoder.choice] = MaskedEncoder(self._model, encoder, self._mode)
        return self._masked[encoder.choice]
