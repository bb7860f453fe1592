"""Plain data against a dataclass: every field there, none beyond, each of its type."""

import dataclasses
import math
import types
import typing
from typing import Any

from innerloop.contract import InnerloopError


class RecordError(InnerloopError):
    """A benchmark record does not follow its schema."""


def build(schema: type[Any], data: Any, path: str) -> Any:
    """An instance of a dataclass. Raises RecordError naming the field, under `path`, that is not as it should be."""
    if not isinstance(data, dict):
        raise RecordError(f"{path} is a {type(data).__name__}; write an object with the fields of {schema.__name__}")
    hints = typing.get_type_hints(schema)
    names = [f.name for f in dataclasses.fields(schema)]
    missing = [name for name in names if name not in data]
    if missing:
        raise RecordError(f"{path} lacks the field(s) {', '.join(missing)}; write the record again with bench")
    extra = [name for name in data if name not in names]
    if extra:
        raise RecordError(f"{path} has unknown field(s) {', '.join(extra)}; remove them or add them to the schema")
    return schema(**{name: _check(data[name], hints[name], f"{path}.{name}") for name in names})


def _check(value: Any, hint: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        plain = [part for part in typing.get_args(hint) if part is not type(None)]
        return None if value is None else _check(value, plain[0], path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, path)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(hint)
        return [_check(element, item, f"{path}[{index}]") for index, element in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        _, item = typing.get_args(hint)
        return {str(key): _check(element, item, f"{path}.{key}") for key, element in value.items()}
    if hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise RecordError(f"{path} is {value!r}; expected {getattr(hint, '__name__', hint)}")
