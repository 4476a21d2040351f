"""Ranks of a small tiktoken vocabulary."""

from __future__ import annotations

CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
    r"""\s*[\r\n]|\s+(?!\S)|\s"""
)


def ranks() -> dict[bytes, int]:
    """Ranks of a few merges, each of two tokens before it."""
    found = {bytes([i]): i for i in range(256)}
    for text in (
        b"th",
        b"the",
        b" t",
        b" the",
        b"in",
        b"ing",
        b"aa",
        b"aaaa",
        b"  ",
        b"12",
        b"\xe6\x97",
        b"\r\n",
    ):
        found[text] = len(found)
    return found
