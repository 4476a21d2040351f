"""The added tokens of a tokenizer.json are found and taken out without parsing the rest, and nothing else of
it changes.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.tokens.tokenizer_json import added_tokens, laid_out, parse, without_special_tokens

TEXTS = st.text(max_size=5) | st.sampled_from(['{"added_tokens":', "]", '"', "\\", '}],"added_tokens":[{'])
TOKENS = st.lists(st.fixed_dictionaries({"content": TEXTS, "special": st.booleans()}), max_size=3)
OTHERS = st.dictionaries(TEXTS, TEXTS | st.none() | st.lists(TEXTS, max_size=2), max_size=4)


@given(added=TOKENS | st.none(), others=OTHERS, before=st.booleans(), spaces=st.booleans())
def test_only_special_tokens_go(
    added: list[dict[str, Any]] | None, others: dict[str, Any], before: bool, spaces: bool
) -> None:
    others.pop("added_tokens", None)
    content = {**others, "added_tokens": added} if before else {"added_tokens": added, **others}
    rest = [token for token in added or [] if not token["special"]]
    for text in (json.dumps(content, indent=2 if spaces else None), laid_out(content)):
        assert added_tokens(text) == (added or [])
        assert orjson.loads(without_special_tokens(text)) == {**others, "added_tokens": rest}
    assert orjson.loads(laid_out(content)) == {**others, "added_tokens": added or []}


def test_a_tokenizer_without_added_tokens_gets_none() -> None:
    assert orjson.loads(laid_out({"model": {}})) == {"added_tokens": [], "model": {}}


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_goes_on_as_it_was(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        assert parse(b'{"a": [1]}') == {"a": [1]}
        with pytest.raises(orjson.JSONDecodeError):
            parse(b"{a")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
