"""Strict settings files: unknown keys and values are refused with one line that names the nearest valid one."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError


class Strict(BaseModel):
    """Unknown keys are refused, values never change after validation, docstrings become schema descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-6` as a string; `1e-6`, `1.0e-6` and `--config lr=1e-6` are one float."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Real = Annotated[float, BeforeValidator(_number)]


def nearest(name: str, known) -> str:
    """', did you mean ...?' or the list of what is known."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(map(str, known)))}"


def known_name(name: str, known, what: str) -> str:
    if name not in known:
        raise ValueError(f"{what} {name!r} is unknown; {nearest(name, known)}")
    return name


def merge(base: dict, over: dict) -> dict:
    """Dictionaries merge, everything else (lists too) is replaced."""
    out = dict(base)
    for key, value in over.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def validate(model: type[BaseModel], data: dict, where: str):
    """Validate, or raise ValueError with one line: where, key, and the nearest valid key or value."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, model)}") from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    path = [str(p) for p in first["loc"]]
    if first["type"] == "extra_forbidden":
        return f"unknown key {path[-1]!r}{_at(path[:-1])}; {nearest(path[-1], _fields(model, first['loc'][:-1]))}"
    if first["type"] == "literal_error":
        options = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return f"{'.'.join(path)}: {first['input']!r} is not valid; {nearest(first['input'], options)}"
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        return f"{'.'.join(path)}: {text}" if path else text
    return f"{'.'.join(path) or 'settings'}: {first['msg']}, not {first['input']!r}"


def _at(path: list[str]) -> str:
    return f" in {'.'.join(path)}" if path else ""


def _fields(model: type[BaseModel], path: tuple) -> list[str]:
    """Field names of the (nested) model that `path` leads to."""
    for part in path:
        field = model.model_fields.get(str(part))
        inner = [a for a in _annotations(field) if isinstance(a, type) and issubclass(a, BaseModel)] if field else []
        if not inner:
            continue
        model = inner[0]
    return list(model.model_fields)


def _annotations(field) -> list:
    queue, out = [field.annotation], []
    while queue:
        item = queue.pop()
        out.append(item)
        queue += list(get_args(item))
    return out


def read_yaml(path: Path) -> dict:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a mapping of keys to values")
    return data
