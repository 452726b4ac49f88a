"""Random wire messages, drawn from the structs' own field types."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis.extra import numpy as hnp

from serve.wire import frontend, step

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
ARRAYS = st.sampled_from(["<i4", "<f4", "<i8", "|u1", "|b1"]).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
)

MESSAGES: tuple[type, ...] = (
    frontend.EngineCoreRequest,
    frontend.EngineCoreOutputs,
    frontend.EngineCoreOutput,
    frontend.ControlCall,
    frontend.Hello,
    frontend.EngineInit,
    frontend.StartFailed,
    frontend.LoadProgress,
    frontend.Ready,
    step.KVCacheSpec,
    step.KVCacheConfig,
    step.SchedulerOutput,
    step.GrammarOutput,
    step.ModelRunnerOutput,
)


def values(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Give a strategy for one field type."""
    inspect = msgspec.inspect
    match info:
        case inspect.StrType():
            return TEXT
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return INT
        case inspect.FloatType():
            return FLOAT
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return st.none() | TEXT | INT
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list[enum.Enum](cls))
        case inspect.UnionType(types=types):
            return st.one_of([values(t) for t in types])
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.CustomType(cls=np.ndarray):
            return ARRAYS
        case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: values(f.type) for f in fields})
    raise AssertionError(f"no strategy for {info}")


def messages_of(message_type: type) -> st.SearchStrategy[Any]:
    """Give a strategy for whole messages of a type."""
    return values(msgspec.inspect.type_info(message_type))


def same(left: Any, right: Any) -> bool:
    """Compare messages field by field; arrays by dtype, shape and content."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right, equal_nan=True)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, n), getattr(right, n)) for n in left.__struct_fields__
        )
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    return bool(left == right)
