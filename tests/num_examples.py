"""How many examples a property tries: few in `make test`, all in `make chaos`."""

from __future__ import annotations

from hypothesis import settings

RANDOM = "random"


def examples(quick: int, *, chaos: int) -> int:
    """The number of examples under the profile of this process, for `settings(max_examples=...)`.

    For properties whose examples take long. `make chaos` runs all properties under the profile `random`.
    """
    return chaos if settings.get_current_profile_name() == RANDOM else quick
