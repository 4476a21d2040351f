"""Two encoders, and a tokenizer on which they differ."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from orchestrator.data.tokens.encoder import installed_version
from orchestrator.planning.encoders import EncoderChoice

FAST, SLOW = (EncoderChoice(name=n, version=installed_version(n) or "") for n in ("gigatoken", "tokenizers"))


def save_tokenizer(folder: Path, texts: list[str]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return str(folder)
