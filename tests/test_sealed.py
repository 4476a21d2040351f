"""Sealed documents: what was sealed comes back, in this form and in the one without number; nothing else."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3

from orchestrator.json_form import LaterSealError, SealError, seal, unseal
from tests.raising import raises

CONTENT = {"b": [1, 2.5, None], "a": "täxt"}
# as it was written before there were numbers
FIRST = (
    json.dumps(
        {
            "content": dict(sorted(CONTENT.items())),
            "digest": blake3('{"a":"täxt","b":[1,2.5,null]}'.encode()).hexdigest(),
        },
        indent=2,
        ensure_ascii=False,
    )
    + "\n"
).encode()


def test_a_document_has_its_number_and_one_without_is_read_for_ever():
    assert json.loads(seal(CONTENT)) == {**json.loads(FIRST), "format": 2}
    assert unseal(seal(CONTENT)) == unseal(FIRST) == CONTENT


@pytest.mark.parametrize("number", [1, 3, "2", None])
def test_another_number_is_refused_with_both(number: object):
    later = json.dumps({**json.loads(FIRST), "format": number}, indent=2, ensure_ascii=False) + "\n"
    with raises(LaterSealError, "storage.later_format", f"format {number},", "reads 1 and 2"):
        unseal(later.encode())


@pytest.mark.parametrize("sealed", [FIRST, seal(CONTENT)], ids=["no number", "format 2"])
def test_no_byte_can_be_another_one(sealed: bytes):
    for at in range(len(sealed)):
        for bit in range(8):
            changed = bytearray(sealed)
            changed[at] ^= 1 << bit
            with pytest.raises(SealError):  # another number in place of the format's is a later format's
                unseal(bytes(changed))
        with raises(SealError, "storage.damaged_document"):
            unseal(sealed[:at])
