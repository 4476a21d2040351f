"""Chat templates, tokenizers with their special tokens, and conversations encoded by both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from orchestrator.data.sources.records.content import Conversation
from orchestrator.data.tokens.encoder import Encoder, installed_version
from orchestrator.data.tokens.loss_mask import MaskedEncoder
from orchestrator.data.tokens.tokenizer_files import examine, fetch
from orchestrator.planning.encoders import EncoderChoice

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"]
SPECIALS += [
    "<|end_header_id|>",
    "<|begin_of_text|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set ms = messages[1:] %}"
    "{% set sys = messages[0]['content'] %}"
    "{% else %}{% set ms = messages %}{% set sys = false %}{% endif %}"
    "{% for m in ms %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and sys %}{% set content = '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
TEXTS = [
    "Hello, who are you? I am the assistant of the house.",
    "The quick brown fox jumps over the lazy dog, naïve über 日本語 and \n\n new lines\n\n\n",
    "def f(x):\n    return x + 1  # comment\n",
]


def byte_level(normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*TEXTS, "user\n assistant\n system\n model\n\n\n"], trainer)
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIALS, *fallback])
    tokenizer.train_from_iterator([*TEXTS, "user\n assistant\n system\n model\n\n\n"], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))


def saved(folder: Path, tokenizer: Tokenizer, template: str, **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return str(folder)


class Chat:
    """A tokenizer with a template, as the stream uses it and as transformers does."""

    def __init__(self, name: str, mode: str = "text", encoder: str = "tokenizers") -> None:
        self.name = name
        facts = examine(name, fetch(name), chat=True)
        self.tokenizer = Tokenizer.from_file(f"{name}/tokenizer.json")
        choice = EncoderChoice(name=encoder, version=installed_version(encoder) or "")
        self.masked = MaskedEncoder(facts.model, Encoder(facts.model, choice, mode), mode)

    def __call__(self, document: Any, loss: str = "assistant", **more: Any) -> tuple[list[int], list[bool]]:
        ends, piece_bytes = more.get("ends", (None, None)), more.get("piece_bytes", 1 << 20)
        made = self.masked.encode(document, loss, ends, piece_bytes)
        tokens = [i for piece in made.pieces for i in piece.tokens.tolist()]
        return tokens, [bool(i) for piece in made.pieces for i in piece.loss.tolist()]

    def learnt(self, document: Any, loss: str = "assistant") -> list[str]:
        """The runs of targets, as texts."""
        found: list[list[int]] = []
        before = False
        for token, target in zip(*self(document, loss), strict=True):
            if target and not before:
                found.append([])
            if target:
                found[-1].append(token)
            before = target
        return [self.tokenizer.decode(run, skip_special_tokens=False) for run in found]


def chat(*contents: str, first: str = "user") -> Conversation:
    roles = ["user", "assistant"] if first == "user" else [first, "user", "assistant"]
    order = [roles[0]] if first == "system" else []
    order += ["user", "assistant"] * len(contents)
    return Conversation(
        messages=tuple({"role": r, "content": c} for r, c in zip(order, contents, strict=False))
    )


def with_legacy_prefix() -> Tokenizer:
    """As Llama 2 has it: the space before a text is a normalizer's."""
    content = json.loads(metaspace("always").to_str())
    content["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer
