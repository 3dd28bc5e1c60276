"""Dataclasses to and from JSON, every field checked on the way in."""

import json
import math
import os
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class FileError(ValueError):
    """A stored file cannot be used; the message names the file and what is wrong with it."""


def encode(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists; the keys of dictionaries become text."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(wanted: type[T], value: Any, where: str = "") -> T:
    """What `encode` made of a `wanted`.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message says which.
    """
    return _decode(wanted, value, where)


def _decode(wanted: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _decode(next(one for one in arguments if one is not type(None)), value, where)
    if is_dataclass(wanted):
        return _decode_dataclass(wanted, value, where)
    if origin is list:
        return list(_decode(types.GenericAlias(tuple, (arguments[0], ...)), value, where))
    if origin is tuple:
        if not isinstance(value, list) or (arguments[-1] is not Ellipsis and len(value) != len(arguments)):
            raise ValueError(f"{where} is {_shown(value)}, not a list of the expected length")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(
            _decode(kind, one, f"{where}[{i}]") for i, (kind, one) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_shown(value)}, not an object")
        key, kind = arguments
        return {_key(key, name, where): _decode(kind, one, f"{where}.{name}") for name, one in value.items()}
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{where} is {_shown(value)}, not {wanted.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}")
    return value


def _decode_dataclass(wanted: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the content'} is {_shown(value)}, not an object")
    kinds = get_type_hints(wanted)
    names = [field.name for field in fields(wanted)]
    for problem, found in (("is missing", set(names) - set(value)), ("is not known", set(value) - set(names))):
        if found:
            raise ValueError(f"{where + '.' if where else ''}{min(found)} {problem}")
    prefix = f"{where}." if where else ""
    return wanted(**{name: _decode(kinds[name], value[name], prefix + name) for name in names})


def _key(kind: type, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{where} has the key {text!r}, not {kind.__name__}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def read(path: Path, version: int) -> dict[str, Any]:
    """A JSON object that `write` wrote with this version.

    Raises:
        FileError: it is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    found = content.pop("version", None) if isinstance(content, dict) else None
    if found != version:
        raise FileError(f"{path} has version {found}, this fodit reads {version}: run `fodit tune` again")
    return content


def load(wanted: type[T], path: Path, version: int, name: str, wrong: str) -> T:
    """The `wanted` that the object has by this name.

    Args:
        wrong: says of the path that there is no such thing in it.

    Raises:
        FileError: the file is broken or of another version.
    """
    content = read(path, version)
    try:
        return decode(wanted, content.get(name))
    except ValueError as error:
        raise FileError(f"{path} {wrong}: {error}; delete it and run `fodit tune`") from error


def write(path: Path, version: int, content: dict[str, Any]) -> None:
    """Write as JSON, all of it or nothing: whoever reads the file meanwhile sees the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(json.dumps({"version": version, **content}, indent=1) + "\n", encoding="utf-8")
    half.replace(path)
