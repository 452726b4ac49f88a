"""A tiny question file, and what transformers says of its answers: the reference for the lm-eval harness."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The quick brown fox jumps over the", ("lazy dog", "12 tokens")),
    ("In the beginning there were", ("12 tokens, then 345", "Caf\u00e9")),
    ("Caf\u00e9 na\u00efve", ("\u00fcber stra\u00dfe", "\u4f60\u597d", "the rest of the world")),
    ("Q:", ("A", "B")),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One answer to one question; num_context ids of token_ids are the question's."""

    token_ids: list[int]
    num_context: int


def candidates(folder: Path) -> list[Candidate]:
    """Tokenize every answer behind its question, as the harness does: together, after one blank."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [
        Candidate(encode(f"{question} {answer}"), len(encode(question)))
        for question, answers in QUESTIONS
        for answer in answers
    ]


def reference(folder: Path) -> list[tuple[float, bool]]:
    """Give the log-likelihood of each candidate by transformers in float32, and whether it is the greedy answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [_score(model, candidate) for candidate in candidates(folder)]


def _score(model: torch.nn.Module, candidate: Candidate) -> tuple[float, bool]:
    ids = torch.tensor([candidate.token_ids])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    before, answer = logprobs[candidate.num_context - 1 : -1], ids[0, candidate.num_context :]
    total = before.gather(1, answer[:, None]).sum().item()
    return total, bool((before.argmax(dim=-1) == answer).all())
