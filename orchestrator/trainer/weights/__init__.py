"""The first weights of a run: from transformers folders, safetensors files or an initialization."""
