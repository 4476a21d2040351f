"""From documents to token ids: the tokenizer's files, the encoder, and chunks of tokens."""
