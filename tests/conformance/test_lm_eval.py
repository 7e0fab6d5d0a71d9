"""lm-eval's local-completions gets the loglikelihoods that transformers computes, in float32, of the same model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="make conformance installs lm-eval")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

ROOT = Path(__file__).parents[2]
ITEMS = 20
TOLERANCE = 1e-3  # nats, of a whole continuation; both compute in float32, in another order


def reference(*arguments: str, stdin: str = "") -> str:
    command = [ROOT / ".venv" / "bin" / "python", "-m", "tests.conformance.reference", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, input=stdin, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    reference(folder)
    return folder


def items() -> list[tuple[str, str]]:
    """Pairs out of a page of English: some words, and those that follow them; and what a model should say itself."""
    words = (ROOT / "tests" / "data" / "page.txt").read_text().split()
    cut = [words[start : start + 24] for start in range(0, 12 * (ITEMS - 4), 12)]
    pairs = [(" ".join(part[:16]), " " + " ".join(part[16:])) for part in cut]
    return [
        *pairs,
        ("One, two, three,", " four"),
        ("The capital of France is", " Paris"),
        ("A B C D E", " F"),
        ("", "The"),
    ]


@pytest.mark.parametrize("tokens", [True, False])
def test_loglikelihoods_are_those_of_transformers(daemon: str, tokenizer: str, tokens: bool) -> None:
    lm: Any = LocalCompletionsAPI(
        model="SmolLM2-135M-Instruct", base_url=f"{daemon}/v1/completions", tokenizer=tokenizer,
        tokenizer_backend="huggingface", tokenized_requests=tokens, num_concurrent=4, max_length=2048,
    )  # fmt: skip
    pairs = items()
    assert len(pairs) == ITEMS
    instances = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = lm.loglikelihood(instances)
    encoded = [lm._encode_pair(*pair) if pair[0] else ([lm.prefix_token_id], lm.tok_encode(pair[1])) for pair in pairs]
    expected = json.loads(reference(stdin=json.dumps(encoded)))
    differences = [abs(ours - theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True)]
    print(f"largest difference of {ITEMS} loglikelihoods: {max(differences):.2e} nats")
    assert max(differences) < TOLERANCE
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in expected)
    assert not all(greedy for _, greedy in expected)
