"""Arrow arrays in the types that Arrow's compute functions support.

Arrow has several layouts of one value: a text is a string, a large string, a string view, or one of these
in a dictionary or run-end encoded. Few functions support all of them. `plain_array` replaces these layouts:

    string_view, binary_view          -> large_string, large_binary
    list_view, large_list_view        -> large_list
    run_end_encoded                   -> its values, repeated
    dictionary                        -> its values; of texts a dictionary still

at any depth. Arrays that need no change are returned as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def plain_type(kind: Any) -> Any:
    """The type of `plain_array` of an array of this type. Raises `pyarrow.ArrowException` if Arrow lacks a
    function for it.
    """
    import pyarrow as pa

    return plain_array(pa.nulls(2, kind)).type


def plain_array(array: Any) -> Any:
    """The same values in a type that Arrow's compute functions support. Texts are not checked for UTF-8.

    The offsets and indices of the array are used as they are; see `require_sound`. Raises
    `pyarrow.ArrowException` if Arrow lacks a function for it.
    """
    import pyarrow as pa

    kind, types = array.type, pa.types
    if types.is_string_view(kind):
        return array.cast(pa.large_binary()).view(pa.large_string())
    if types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        runs = np.searchsorted(ends, np.arange(len(array)) + array.offset, side="right")
        return plain_array(array.values).take(pa.array(runs, pa.int64()))
    if types.is_dictionary(kind):
        return _plain_dictionary(array)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return _list_of_views(array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _plain_list(array)
    if types.is_map(kind):
        return _plain_map(array)
    return _plain_struct(array) if types.is_struct(kind) else array


def _plain_dictionary(array: Any) -> Any:
    import pyarrow as pa

    values = plain_array(array.dictionary)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(is_text(values.type) for is_text in texts):
        return values.take(array.indices)
    if values.type == array.type.value_type:
        return array
    return pa.DictionaryArray.from_arrays(array.indices, values, ordered=array.type.ordered, safe=False)


def _list_of_views(array: Any) -> Any:
    """List views may overlap and lie in any order: their items are taken one list after the other."""
    import pyarrow as pa

    sizes = np.where(_valid(array), array.sizes.to_numpy(zero_copy_only=False), 0).astype(np.int64)
    ends = np.cumsum(sizes)
    shifts = array.offsets.to_numpy(zero_copy_only=False)[: len(array)] - (ends - sizes)
    places = np.repeat(shifts, sizes) + np.arange(ends[-1] if len(ends) else 0)
    items = plain_array(array.values).take(pa.array(places, pa.int64()))
    return _large_list(array, np.concatenate([[0], ends]), items)


def _plain_list(array: Any) -> Any:
    import pyarrow as pa

    items = plain_array(array.values)
    if items.type == array.type.value_type:
        return array
    if pa.types.is_fixed_size_list(array.type):
        offsets = (np.arange(len(array) + 1) + array.offset) * array.type.list_size
    else:
        offsets = _offsets(array)
    return _large_list(array, offsets, items)


def _large_list(array: Any, offsets: Any, items: Any) -> Any:
    import pyarrow as pa

    field = array.type.value_field.with_type(items.type)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), items, type=pa.large_list(field), mask=_mask(array)
    )


def _plain_map(array: Any) -> Any:
    import pyarrow as pa

    keys, items, kind = plain_array(array.keys), plain_array(array.items), array.type
    if (keys.type, items.type) == (kind.key_type, kind.item_type):
        return array
    plain = pa.map_(
        kind.key_field.with_type(keys.type), kind.item_field.with_type(items.type), kind.keys_sorted
    )
    return pa.MapArray.from_arrays(
        pa.array(_offsets(array), pa.int32()), keys, items, type=plain, mask=_mask(array)
    )


def _plain_struct(array: Any) -> Any:
    import pyarrow as pa

    inner = [plain_array(array.field(i)) for i in range(array.type.num_fields)]
    fields = [field.with_type(each.type) for field, each in zip(array.type, inner, strict=True)]
    if all(field.type == old.type for field, old in zip(fields, array.type, strict=True)):
        return array
    return pa.StructArray.from_arrays(inner, fields=fields, mask=_mask(array))


def _offsets(array: Any) -> Any:
    """(num_lists + 1,) where the items of each list or map begin, and where the last ends."""
    return array.offsets.to_numpy(zero_copy_only=False) if len(array) else np.zeros(1, np.int64)


def _valid(array: Any) -> Any:
    return array.is_valid().to_numpy(zero_copy_only=False)


def _mask(array: Any) -> Any:
    return array.is_null() if array.null_count else None


def require_sound(array: Any) -> None:
    """Raises `pyarrow.ArrowInvalid` if a value lies outside the memory of the array.

    Does not check that texts are UTF-8: a text that is not is one bad record.
    """
    import pyarrow as pa

    kind, types = array.type, pa.types
    array.validate()
    if (as_bytes := _as_bytes(kind)) is not None:
        array.view(as_bytes).validate(full=True)
    elif types.is_dictionary(kind):
        array.indices.validate(full=True)
        indices = array.indices.drop_null().to_numpy(zero_copy_only=False)
        _require(len(array.dictionary) > indices.max(initial=0) or not len(indices), "an index is too large")
        _require(indices.min(initial=0) >= 0, "an index is negative")
        require_sound(array.dictionary)
    elif types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        _require(bool((np.diff(ends) > 0).all()), "its runs are not in order")
        _require(
            not len(array) or (len(ends) > 0 and ends[-1] >= array.offset + len(array)), "a run is missing"
        )
        require_sound(array.values)
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        if len(array):
            offsets, sizes = (
                each.to_numpy(zero_copy_only=False).astype(np.int64) for each in (array.offsets, array.sizes)
            )
            _require(bool((offsets >= 0).all() and (sizes >= 0).all()), "a list has a negative place")
            _require(bool((sizes <= len(array.values) - offsets).all()), "a list ends behind its items")
        require_sound(array.values)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets, items = _offsets(array), (array.keys, array.items) if types.is_map(kind) else (array.values,)
        in_order = bool(offsets[0] >= 0 and (offsets[1:] >= offsets[:-1]).all())
        _require(in_order and offsets[-1] <= len(items[0]), "its lists are not in order")
        for each in items:
            require_sound(each)
    elif types.is_fixed_size_list(kind):
        require_sound(array.values)
    elif types.is_struct(kind):
        for i in range(kind.num_fields):
            require_sound(array.field(i))
    elif isinstance(kind, pa.BaseExtensionType):
        require_sound(array.storage)
    else:
        array.validate(full=True)


def _as_bytes(kind: Any) -> Any:
    """The type of bytes with the same layout as this type of texts; None for another type."""
    import pyarrow as pa

    types = pa.types
    texts: dict[Callable[[Any], bool], Callable[[], Any]] = {
        types.is_string: pa.binary,
        types.is_large_string: pa.large_binary,
        types.is_string_view: pa.binary_view,
    }
    return next((as_bytes() for is_text, as_bytes in texts.items() if is_text(kind)), None)


def _require(holds: bool, wrong: str) -> None:
    import pyarrow as pa

    if not holds:
        raise pa.ArrowInvalid(f"the column is damaged: {wrong}")
