"""What a drafting model means on this machine: the part of the plan that `--speculative-config` asks for.

A pure function of plain numbers, like the rest of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import ConfigError
from config.facts import ModelFacts
from config.settings import Settings
from config.sizes import format_size
from config.speculative import SpeculativeConfig

RUNS_MODEL = ("draft_model", "self")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafting model beside the one served. `num_pages` is 0 for one that drafts in the target's pages."""

    model: str
    quantization: str
    weight_bytes: int  # an estimate
    page_bytes: int
    num_pages: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.num_pages * self.page_bytes

    def sizes(self) -> str:
        """For people."""
        pages = f"{format_size(self.num_pages * self.page_bytes)} of pages" if self.num_pages else "in the same pages"
        return f"{format_size(self.weight_bytes)} of weights, {pages}"


def choose_speculation(settings: Settings, backend: str) -> tuple[SpeculativeConfig | None, str]:
    """What drafts, None for nothing, and why. What costs nothing and changes no bit is on unless told otherwise."""
    asked = settings.speculative_config
    if asked is not None:
        return (None if asked.method == "none" else asked), "as asked"
    if backend == "cpu" and settings.speculative_acceptance == "keyed":
        ngram = SpeculativeConfig.model_validate({"method": "ngram"})
        return ngram, "default: changes no bit, and drafts only where it pays"
    return None, ""


def plan_drafting(
    asked: SpeculativeConfig | None,
    target: ModelFacts,
    draft: ModelFacts | None,
    *,
    quantization: str,
    dtype: str,
    kv_dtype: str,
    backend: str,
    page_size: int,
    free: int,
) -> DraftPlan | None:
    """The drafting model, where one is asked for. `quantization` to `page_size` are the target's; `free` bytes are left
    after its weights. `draft` are the facts of a second model, None for `self`. Raises ConfigError."""
    if asked is None or asked.method not in RUNS_MODEL:
        return None
    facts = draft or target
    own = _quantization(asked, facts, backend)
    weight_bytes = facts.weight_bytes(own, dtype)
    page_bytes = num_pages = 0
    if draft is None:
        if backend != "cpu":
            raise ConfigError('--speculative-config: "self" needs the CPU kernels')
        if weight_bytes >= target.weight_bytes(quantization, dtype):
            raise ConfigError(
                f'--speculative-config: "self" drafts with lighter weights than are served, and {own} is no lighter: '
                "use --quantization none, or another method"
            )
    else:
        page_bytes = page_size * facts.kv_token_bytes(kv_dtype)
        num_pages = max(0, asked.kv_memory.of(free - weight_bytes)) // page_bytes
    if weight_bytes + num_pages * page_bytes > free or (draft is not None and not num_pages):
        raise ConfigError(
            f"--speculative-config: the drafting model needs {format_size(weight_bytes)} for its weights and some for "
            f"pages, and {format_size(max(0, free))} are free: use a smaller one"
        )
    return DraftPlan(facts.name, own, weight_bytes, page_bytes, num_pages)


def _quantization(asked: SpeculativeConfig, facts: ModelFacts, backend: str) -> str:
    if asked.quantization == "auto" and backend == "cpu" and facts.weight_bits is not None:
        return "stored"
    if asked.quantization == "auto":
        return "int4" if asked.method == "self" else "none"
    if asked.quantization != "none" and backend != "cpu":
        if "quantization" in asked.model_fields_set:
            raise ConfigError(f'--speculative-config: "{asked.quantization}" needs the CPU kernels: use "none"')
        return "none"
    return asked.quantization
