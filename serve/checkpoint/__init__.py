"""Finds a checkpoint's files and reads its description: config.json or GGUF header to ModelArch; no tensors.

Model files are data: everything read here is JSON or a GGUF header, type-checked field by field, and names of files
found inside them may not leave the folder.
"""

from serve.checkpoint.arch import (
    Checkpoint,
    EncoderArch,
    ModelArch,
    PoolerConfig,
    Quantization,
    RopeScaling,
    WeightScheme,
)
from serve.checkpoint.folder import FAMILIES, read_generation_config, sampling_defaults
from serve.checkpoint.load import load_checkpoint

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "EncoderArch",
    "ModelArch",
    "PoolerConfig",
    "Quantization",
    "RopeScaling",
    "WeightScheme",
    "load_checkpoint",
    "read_generation_config",
    "sampling_defaults",
]
