"""Rotary position embeddings: the table of cosines and sines for every position, with scaling of long contexts.

Source: arXiv 2104.09864 (rotary), 2309.00071 (yarn), and the llama3 and dynamic rules of transformers, whose values
the table equals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serve.checkpoint import RopeScaling


def cos_sin_table(
    scaling: RopeScaling, theta: float, *, rotary_size: int, num_positions: int, divisors: Tensor | None = None
) -> Tensor:
    """Tabulate [num_positions, rotary_size] float32: rotary_size / 2 cosines, then as many sines.

    divisors [rotary_size / 2] are the file's own for kind "table".

    Dynamic scaling changes the base with the length of the sequence. Here the angle of a position never depends on
    later tokens or other requests, so each position is turned as in a sequence that ends with it. That is what
    transformers does for every token it generates, and the same up to the original length.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    if scaling.kind == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(scaling, theta, rotary_size, positions)
        factor = 1.0
    else:
        frequencies, factor = inverse_frequencies(scaling, theta, rotary_size, divisors)
        angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


def inverse_frequencies(
    scaling: RopeScaling, theta: float, rotary_size: int, divisors: Tensor | None = None
) -> tuple[Tensor, float]:
    """Give radians per position for each pair [rotary_size / 2] and the factor on cosines and sines."""
    plain = _plain_frequencies(theta, rotary_size)
    if scaling.kind == "none":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(scaling, plain), 1.0
    if scaling.kind == "yarn":
        return _yarn_frequencies(scaling, theta, rotary_size), yarn_attention_factor(scaling)
    if scaling.kind == "table" and divisors is not None and divisors.shape == plain.shape:
        return plain / divisors.float(), 1.0
    raise ValueError(f"rope scaling {scaling.kind!r} has no frequencies of its own")


def _plain_frequencies(theta: float, rotary_size: int) -> Tensor:
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    return 1.0 / (theta**exponents)


def _dynamic_frequencies(scaling: RopeScaling, theta: float, rotary_size: int, positions: Tensor) -> Tensor:
    """Give frequencies [num_positions, rotary_size / 2]: beyond the original length the base grows."""
    original = scaling.original_max_position
    lengths = torch.clamp(positions + 1, min=original)
    stretch = scaling.factor * lengths / original - (scaling.factor - 1)
    bases = theta * stretch ** (rotary_size / (rotary_size - 2))
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    return 1.0 / (bases[:, None] ** exponents)


def _llama3_frequencies(scaling: RopeScaling, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between the two wavelengths."""
    original = scaling.original_max_position
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    is_long = wavelengths > original / low
    is_short = wavelengths < original / high
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, blended))


def _yarn_frequencies(scaling: RopeScaling, theta: float, rotary_size: int) -> Tensor:
    """Keep pairs that turn often within the original length, stretch those that do not, ramp between."""

    def pair_with_turns(turns: float) -> float:
        length = scaling.original_max_position
        return rotary_size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    # Equal ends would divide by zero; the tiny width makes a step of the ramp.
    width = high - low if high != low else 0.001
    ramp = torch.clamp((torch.arange(rotary_size // 2, dtype=torch.float32) - low) / width, 0, 1)
    periods = theta ** (torch.arange(0, rotary_size, 2).float() / rotary_size)
    return ramp / (scaling.factor * periods) + (1 - ramp) / periods


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Give the factor on cosines and sines that keeps attention as sharp as at the original length."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def at(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return at(scaling.mscale) / at(scaling.mscale_all_dim)
    return at(1.0)
