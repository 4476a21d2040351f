"""What stands where Ray Train's synchronization actor would be: a process where workers meet when they report
to Ray, which ours never do. It goes to every worker and loads nothing.
"""

from __future__ import annotations

from typing import Any


class NoBarrier:
    """Made as Ray makes the actor: `NoBarrier.options(...).remote(...)`."""

    @classmethod
    def options(cls, **_: Any) -> type[NoBarrier]:
        """Nothing to choose."""
        return cls

    @classmethod
    def remote(cls, **_: Any) -> NoBarrier:
        """No process is started."""
        return cls()
