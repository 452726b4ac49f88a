"""The rotary table against the values of transformers, and the rule for dynamic scaling."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from serve.checkpoint import RopeScaling
from serve.models.layers.rope import cos_sin_table, inverse_frequencies, yarn_attention_factor
from tests.checkpoints import tiny_config

SIZE = 24
ORIGINAL = 64
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"original_max_position_embeddings": ORIGINAL}


def config_with(parameters: dict[str, object], max_position_embeddings: int = 512):  # type: ignore[no-untyped-def]
    rope = {"rope_theta": 10000.0} | parameters
    return tiny_config("llama", head_dim=SIZE, max_position_embeddings=max_position_embeddings, rope_parameters=rope)


def scaling_of(parameters: dict[str, object]) -> RopeScaling:
    fields = dict(parameters)
    fields["kind"] = fields.pop("rope_type")
    fields["original_max_position"] = fields.pop("original_max_position_embeddings", ORIGINAL)
    return RopeScaling(**fields)


CASES = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0} | LLAMA3,
    {"rope_type": "llama3", "factor": 32.0} | LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0} | YARN,
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3} | YARN,
    {"rope_type": "yarn", "factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0} | YARN,
    {"rope_type": "yarn", "factor": 16.0, "truncate": False} | YARN,
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7} | YARN,
]


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_frequencies_equal_transformers(parameters: dict[str, object]) -> None:
    expected, expected_factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config_with(parameters), "cpu")
    actual, factor = inverse_frequencies(scaling_of(parameters), 10000.0, SIZE)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-7)


@pytest.mark.parametrize("parameters", [{"rope_type": "default"}, CASES[0], CASES[1], CASES[4]], ids=str)
def test_table_equals_transformers_cosines_and_sines(parameters: dict[str, object]) -> None:
    positions = torch.arange(300)
    cosines, sines = LlamaRotaryEmbedding(config_with(parameters))(torch.zeros(1), positions[None])
    scaling = RopeScaling() if parameters["rope_type"] == "default" else scaling_of(parameters)
    table = cos_sin_table(scaling, 10000.0, rotary_size=SIZE, num_positions=300)
    assert table.shape == (300, SIZE)
    torch.testing.assert_close(table[:, : SIZE // 2], cosines[0, :, : SIZE // 2], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, SIZE // 2 :], sines[0, :, : SIZE // 2], rtol=0, atol=2e-5)


def test_dynamic_position_is_turned_as_in_a_sequence_that_ends_with_it() -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0}
    config = config_with(parameters, max_position_embeddings=ORIGINAL)
    table = cos_sin_table(scaling_of(parameters), 10000.0, rotary_size=SIZE, num_positions=200)
    for position in (0, 1, ORIGINAL - 1, ORIGINAL, 100, 199):
        inverse, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=position + 1)
        expected = torch.cat(((position * inverse).cos(), (position * inverse).sin()))
        torch.testing.assert_close(table[position], expected, rtol=0, atol=2e-5)


def test_dynamic_scaling_equals_transformers_token_by_token() -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0}
    rotary = LlamaRotaryEmbedding(config_with(parameters, max_position_embeddings=ORIGINAL))
    table = cos_sin_table(scaling_of(parameters), 10000.0, rotary_size=SIZE, num_positions=160)
    for position in range(160):
        cosines, _ = rotary(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(table[position, : SIZE // 2], cosines[0, 0, : SIZE // 2], rtol=0, atol=2e-5)


def test_table_of_divisors_divides_the_plain_frequencies() -> None:
    divisors = torch.linspace(1, 8, SIZE // 2)
    actual, factor = inverse_frequencies(RopeScaling(kind="table"), 10000.0, SIZE, divisors)
    plain = 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    torch.testing.assert_close(actual.double(), plain / divisors, rtol=1e-6, atol=0)
    assert factor == 1.0


def test_yarn_keeps_attention_as_sharp_as_the_paper_says() -> None:
    # 0.1 ln(16) + 1, equation 22 of arXiv 2309.00071.
    assert yarn_attention_factor(RopeScaling(kind="yarn", factor=16.0)) == pytest.approx(1.2772588722239782)
