"""Data classes of tables, arrays and plain values as JSON and named arrays, and back, each value of its own type.

What is read back runs no code: unlike a pickle, a packed file from somewhere else can at worst be wrong or refused.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pandas as pd

Arrays = dict[str, np.ndarray[Any, Any]]
T = TypeVar("T")

# Values that JSON does not know stand in objects of one key; one that has such a key by chance is packed as pairs.
MARKS = ("$array", "$texts", "$table", "$tuple", "$pairs", "$float", "$path", "$set")


def pack(value: object) -> tuple[bytes, Arrays]:
    """Return a value as JSON, and the arrays it refers to by name.

    Raises:
        TypeError: it holds something that cannot be packed.
    """
    arrays: Arrays = {}
    return msgspec.json.encode(_packed(value, "", arrays)), arrays


def unpack(text: bytes, arrays: Mapping[str, np.ndarray[Any, Any]], cls: type[T]) -> T:
    """Return the value that was packed, as an instance of its class.

    Raises:
        ValueError, KeyError, TypeError: text and arrays do not hold one.
    """
    return msgspec.convert(_unpacked(msgspec.json.decode(text), arrays), cls, dec_hook=_own)


def unpack_each(text: bytes, arrays: Mapping[str, np.ndarray[Any, Any]], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a packed dict, each as an instance of its type.

    Raises:
        ValueError, KeyError, TypeError: text and arrays do not hold them.
    """
    found = _unpacked(msgspec.json.decode(text), arrays)
    return {name: msgspec.convert(found[name], kind, dec_hook=_own) for name, kind in types.items()}


def _own(cls: type, value: object) -> object:
    """Let tables, arrays and paths pass, which are of their types already."""
    return value


def _packed(value: Any, name: str, arrays: Arrays) -> Any:  # noqa: ANN401  JSON
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Enum):
        return _packed(value.value, name, arrays)
    if isinstance(value, np.generic):
        return _packed(value.item(), name, arrays)
    if isinstance(value, pd.DataFrame):
        return {"$table": _table(value, name, arrays)}
    if isinstance(value, np.ndarray):
        return _array(value, name, arrays)
    if isinstance(value, Path):
        return {"$path": str(value)}
    if is_dataclass(value):
        return {
            field.name: _packed(getattr(value, field.name), _below(name, field.name), arrays) for field in fields(value)
        }
    if isinstance(value, tuple):
        return {"$tuple": [_packed(part, _below(name, index), arrays) for index, part in enumerate(value)]}
    if isinstance(value, list):
        return [_packed(part, _below(name, index), arrays) for index, part in enumerate(value)]
    if isinstance(value, set | frozenset):
        return {"$set": [_packed(part, _below(name, index), arrays) for index, part in enumerate(sorted(value))]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not any(mark in value for mark in MARKS):
            return {key: _packed(part, _below(name, key), arrays) for key, part in value.items()}
        pairs = [[_packed(key, name, arrays), _packed(value[key], _below(name, key), arrays)] for key in value]
        return {"$pairs": pairs}
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"{name}: cannot pack {type(value).__name__}")


def _below(name: str, part: object) -> str:
    return f"{name}.{part}" if name else str(part)


def _array(value: np.ndarray[Any, Any], name: str, arrays: Arrays) -> dict[str, Any]:
    if value.dtype.kind == "O":
        return _texts(value, "object", name, arrays)
    if value.dtype.kind not in "biuf":
        raise TypeError(f"{name}: cannot pack an array of {value.dtype}")
    arrays[name] = np.ascontiguousarray(value).ravel()
    return {"$array": [name, value.dtype.str, list(value.shape)]}


def _texts(value: np.ndarray[Any, Any], dtype: str, name: str, arrays: Arrays) -> dict[str, Any]:
    """Pack objects, which repeat, as codes of the distinct ones."""
    numbers: dict[tuple[type, object], int] = {}
    flat = value.ravel()
    codes = np.fromiter((numbers.setdefault((type(own), own), len(numbers)) for own in flat), np.int32, len(flat))
    arrays[name] = codes
    distinct = [_packed(own, name, arrays) for _, own in numbers]
    return {"$texts": [name, dtype, list(value.shape), distinct]}


def _table(table: pd.DataFrame, name: str, arrays: Arrays) -> dict[str, Any]:
    index = None
    if not (isinstance(table.index, pd.RangeIndex) and table.index.start == 0 and table.index.step == 1):
        index = _column(table.index.to_series(), _below(name, "$index"), arrays)
    columns = [[str(key), _column(table[key], _below(name, key), arrays)] for key in table.columns]
    return {"rows": len(table), "index": index, "columns": columns}


def _column(column: "pd.Series[Any]", name: str, arrays: Arrays) -> dict[str, Any]:
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes = column.cat.codes.to_numpy().astype(np.int32)
        kept = column.cat.categories.to_series()
        return {
            "codes": _array(codes, name, arrays),
            "categories": _column(kept, _below(name, "$categories"), arrays),
            "ordered": bool(column.cat.ordered),
        }
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
        return _array(column.to_numpy(), name, arrays)
    return _texts(column.to_numpy(dtype=object), str(column.dtype), name, arrays)


def _unpacked(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:  # noqa: ANN401  JSON
    if isinstance(value, list):
        return [_unpacked(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    mark: str
    content: Any
    mark, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if mark not in MARKS:
        return {key: _unpacked(part, arrays) for key, part in value.items()}
    if mark == "$tuple":
        return tuple(_unpacked(part, arrays) for part in content)
    if mark == "$set":
        return frozenset(_unpacked(part, arrays) for part in content)
    if mark == "$pairs":
        return {_unpacked(key, arrays): _unpacked(part, arrays) for key, part in content}
    if mark == "$float":
        return float(content)
    if mark == "$path":
        return Path(content)
    if mark == "$table":
        return _read_table(content, arrays)
    return _read_column(value, arrays)


def _read_table(content: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> pd.DataFrame:
    index = pd.RangeIndex(content["rows"]) if content["index"] is None else _read_column(content["index"], arrays)
    columns = {name: _read_column(column, arrays) for name, column in content["columns"]}
    if any(len(column) != content["rows"] for column in columns.values()):
        raise ValueError("columns of different lengths")
    return pd.DataFrame(columns, index=index)


def _read_column(column: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:  # noqa: ANN401  an array
    if "codes" in column:
        categories = pd.Index(_read_column(column["categories"], arrays), tupleize_cols=False)
        codes = _read_column(column["codes"], arrays)
        return pd.Categorical.from_codes(codes, categories=categories, ordered=column["ordered"])
    if "$array" in column:
        name, dtype, shape = column["$array"]
        if arrays[name].dtype != np.dtype(dtype):
            raise ValueError(f"{name}: {arrays[name].dtype} instead of {dtype}")
        return arrays[name].reshape(shape)
    name, dtype, shape, packed = column["$texts"]
    distinct = np.empty(len(packed), dtype=object)
    for at, part in enumerate(packed):
        distinct[at] = _unpacked(part, arrays)
    found = distinct[arrays[name]] if len(packed) else np.empty(0, dtype=object)
    return found.reshape(shape) if dtype == "object" else pd.array(found, dtype=dtype)
