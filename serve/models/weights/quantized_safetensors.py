"""Safetensors files whose matrices are whole numbers with scales: several tensors of a file make one parameter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from serve.checkpoint import Checkpoint, Quantization
from serve.errors import ConfigError, ExitCode
from serve.kernels.quantized_weight import AffineBlocks
from serve.models.weights.integer_formats import (
    PackedLayer,
    companion_tensors,
    matrix_shape,
    primary_tensor,
    unpack_matrix,
)
from serve.models.weights.safetensors import SafetensorsSource

log = logging.getLogger(__name__)

# Scales of rounded keys, values and queries: the cache keeps its own type here.
_CACHE_SCALES: Final = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")


class QuantizedSafetensorsSource:
    """All tensors of the files by parameter name; a packed matrix goes by the name that it has unpacked.

    is_parameter tells of a name whether the architecture has it.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, is_parameter: Callable[[str], bool]) -> None:
        self._quantization = quantization
        self._files = SafetensorsSource(checkpoint.weight_files, integers=True)
        self._telling = threading.Lock()
        self._has_told = False
        self._layers = _find_layers(self._files, quantization)
        if not self._layers:
            raise ConfigError(
                f"{checkpoint.root}: config says that the weights are {quantization.description}, but the files hold "
                "no such tensor; fetch them again, or remove the entry from the config if they are plain",
                ExitCode.MODEL,
            )
        used = {f"{name}.{part}" for name, layer in self._layers.items() for part in layer.tensors}
        plain = [name for name in self._files.shapes if name not in used and not name.endswith(_CACHE_SCALES)]
        self._check_plain(plain)
        self._shapes: dict[str, tuple[int, ...]] = {
            name: self._files.shapes[name]
            for name in plain
            if not name.endswith(".bias") or is_parameter(name) or not self._is_empty_bias(name)
        }
        self._shapes |= {f"{name}.weight": matrix_shape(layer) for name, layer in self._layers.items()}
        log.info("weights: %s, %d matrices", quantization.description, len(self._layers))
        if quantization.activations is not None:
            log.info(
                "the checkpoint was made for activations in %s; they are not rounded to it here",
                quantization.activations,
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters of the files."""
        return self._shapes

    def read(self, name: str, out: Tensor) -> None:
        """Write a parameter to out, unpacked if need be."""
        layer = self._layer(name)
        if layer is None:
            self._files.read(name, out)
        else:
            unpack_matrix(layer).dequantize(out)

    def dtype(self, name: str) -> torch.dtype:
        """Give the type that the file has; float32 for a packed matrix."""
        return self._files.dtype(name) if self._layer(name) is None else torch.float32

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give the file's memory when it already holds that type, aligned."""
        return self._files.mapped(name, dtype) if self._layer(name) is None else None

    def blocks(self, name: str) -> AffineBlocks | None:
        """Give a packed matrix for the kernels, None for a plain one and for groups that fit no tile."""
        layer = self._layer(name)
        if layer is None:
            return None
        blocks = unpack_matrix(layer).blocks()
        if blocks is None:
            self._tell_of_floats(layer)
        return blocks

    def rope_divisors(self) -> Tensor | None:
        """Give None: the format's models say in config.json how frequencies are scaled."""
        return None

    def _layer(self, name: str) -> PackedLayer | None:
        return self._layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    def _tell_of_floats(self, layer: PackedLayer) -> None:
        """Say once that some matrices take more memory and time than they could."""
        with self._telling:
            if not self._has_told:
                log.warning("%s and maybe others fit no tile of 32 inputs and are kept as floats", layer.name)
            self._has_told = True

    def _is_empty_bias(self, name: str) -> bool:
        """Tell a bias of zeros beside a packed matrix, as some writers add to every layer."""
        return name.removesuffix(".bias") in self._layers and not bool(self._files.view(name).any())

    def _check_plain(self, names: Sequence[str]) -> None:
        """Refuse whole numbers that belong to no matrix: their values would mean nothing."""
        for name in names:
            dtype = self._files.dtype(name)
            if not dtype.is_floating_point:
                kind = str(dtype).removeprefix("torch.")
                raise ConfigError(
                    f"tensor {name!r} of type {kind} belongs to no matrix of {self._quantization.description}; "
                    "the files and their config do not fit each other, fetch the checkpoint again",
                    ExitCode.MODEL,
                )


def _find_layers(files: SafetensorsSource, quantization: Quantization) -> dict[str, PackedLayer]:
    """Collect the tensors of each packed matrix by its name without the last part."""
    primary = primary_tensor(quantization.method)
    names = [name.removesuffix(f".{primary}") for name in files.shapes if name.endswith(f".{primary}")]
    parts = companion_tensors(quantization.method)
    if quantization.method == "compressed-tensors":
        bytes_of = [name for name in files.shapes if name.endswith(".weight") and files.dtype(name) == torch.int8]
        names += [name.removesuffix(".weight") for name in bytes_of]
        parts = (*parts, "weight")
    layers: dict[str, PackedLayer] = {}
    for name in names:
        tensors = {part: files.view(f"{name}.{part}") for part in parts if f"{name}.{part}" in files.shapes}
        layers[name] = PackedLayer(name, tensors, quantization)
    return layers
