"""Turns documents into token ids: the tokenizer's files, the encoder, and chunks of tokens."""
