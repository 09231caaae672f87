"""Tensors of a model folder, by name, without transformers.

Owns: the reading of safetensors files. Imports torch and safetensors. Invariant: a file is mapped only while it is open
here, so what is read is copied by whoever keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cluster.model import ModelFolder

FLOATS = {"F32", "F16", "BF16"}


class Weights:
    """All tensors of the files, converted to one dtype as they are read."""

    def __init__(self, files: list[Any], dtype: torch.dtype) -> None:
        names = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118  # no mapping
        self._file_of = dict(names)
        self._is_ambiguous = len(names) > len(self._file_of)
        self._dtype = dtype

    def have_exactly(self, shapes: dict[str, tuple[int, ...]]) -> bool:
        """Whether the files hold these tensors, each once, of these shapes and of floating point, and no others."""
        if self._is_ambiguous or self._file_of.keys() != shapes.keys():
            return False
        slices = {name: file.get_slice(name) for name, file in self._file_of.items()}
        return all(tuple(s.get_shape()) == shapes[name] and s.get_dtype() in FLOATS for name, s in slices.items())

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """It may be the mapped file itself."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor.to(dtype or self._dtype)


@contextmanager
def open_weights(model: ModelFolder, dtype: torch.dtype) -> Iterator[Weights]:
    """Raises SafetensorError or OSError where a file is none of its kind, or is cut off."""
    with ExitStack() as stack:
        yield Weights([stack.enter_context(safe_open(file, framework="pt")) for file in model.weight_files], dtype)
