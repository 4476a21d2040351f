"""States and layouts for tests, and how rows are divided, by a definition that shares nothing with the
package.
"""

from __future__ import annotations

from hypothesis import strategies as st

from orchestrator.planning.state.state_layout import Layout, StateTensor

LAYOUTS = st.builds(Layout, num_shards=st.integers(1, 7), num_replicas=st.integers(1, 4))
SHAPES = st.lists(st.integers(0, 13), max_size=3).map(tuple)


@st.composite
def tensors(draw, max_size=6):
    """A state: scalars, empty tensors, tensors of few rows; of every tensor that can be, some are sharded."""
    made = []
    for number, shape in enumerate(draw(st.lists(SHAPES, max_size=max_size))):
        sharded = bool(shape) and draw(st.booleans())
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        made.append(
            StateTensor(group="model", name=f"t{number}", shape=shape, itemsize=itemsize, sharded=sharded)
        )
    return made


def cut(num_rows: int, num_shards: int) -> list[list[int]]:
    """torch.chunk's rule, by cutting a list: pieces of the smallest size of which `num_shards` are enough."""
    size = next(size for size in range(1, num_rows + 2) if size * num_shards >= num_rows)
    rest, shards = list(range(num_rows)), []
    for _ in range(num_shards):
        shards.append(rest[:size])
        rest = rest[size:]
    return shards
