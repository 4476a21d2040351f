"""The types of arrays of tokens and positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
else:  # reading a run needs no numpy, which takes 0.1 s to load

    def __getattr__(name: str) -> Any:
        kinds = {"Int32Array": "int32", "Int64Array": "int64", "BoolArray": "bool_"}
        if name not in kinds:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy

        return numpy.typing.NDArray[getattr(numpy, kinds[name])]
