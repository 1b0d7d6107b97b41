"""Typed access to a GGUF file through the `gguf` package, with every failure turned into a ModelImportError."""

import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, ReaderTensor

from loraplane_cli.model_import.errors import ModelImportError

T = TypeVar("T", int, float, str, bool)


class GgufFile:
    """An open (memory-mapped) GGUF: metadata by key, and tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path, "r")
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
            # The reader slices past the end of a short file and fails wherever the empty slice is first used.
            raise ModelImportError(
                "truncated_file", f"{path} cannot be read as GGUF: cut short or damaged ({error})"
            ) from error
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        size = path.stat().st_size
        for tensor in self._reader.tensors:
            end = tensor.data_offset + tensor.n_bytes
            if end > size:
                raise ModelImportError(
                    "truncated_file", f"{path} is cut short: {tensor.name} ends at byte {end} of {size}"
                )

    def architecture(self) -> str:
        return self.require("general.architecture", str)

    def require(self, key: str, kind: type[T]) -> T:
        value = self._value(key)
        if value is None:
            raise ModelImportError("unsupported_model", f"{self.path} has no metadata key {key}")
        return self._typed(key, value, kind)

    def get(self, key: str, kind: type[T], default: T) -> T:
        value = self._value(key)
        return default if value is None else self._typed(key, value, kind)

    def optional_int(self, key: str) -> int | None:
        value = self._value(key)
        return None if value is None else self._typed(key, value, int)

    def strings(self, key: str) -> list[str]:
        return [self._typed(key, item, str) for item in self._list(key)]

    def ints(self, key: str) -> list[int]:
        return [self._typed(key, item, int) for item in self._list(key)]

    def decimal(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
        value = self.require(key, float) if default is None else self.get(key, float, default)
        return float(str(np.float32(value)))

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _list(self, key: str) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list):
            raise ModelImportError("unsupported_model", f"{self.path} has no list under metadata key {key}")
        return value

    def _typed(self, key: str, value: object, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelImportError("unsupported_model", f"{self.path}: {key} is not of type {kind.__name__}")
        return value
