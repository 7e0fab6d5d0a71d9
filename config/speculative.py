"""`--speculative-config`: what the operator asked of speculative decoding. Keys as in vLLM where it has them."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from config.sizes import MemoryAmount, parse_amount


class SpeculativeConfig(BaseModel):
    """One proposer and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram", "draft_model", "self", "lookahead", "none"]
    num_speculative_tokens: int = Field(8, ge=1, le=32)  # the longest draft; how much of it is used adapts
    branches: int = Field(1, ge=1, le=8)  # paths of a draft at most
    adaptive: bool = True  # False: always as many tokens as there is room for
    model: str | None = None  # draft_model: which
    quantization: Literal["auto", "none", "int8", "int4"] = "int4"  # draft_model and self: the drafter's weights
    kv_memory: Annotated[MemoryAmount, BeforeValidator(parse_amount)] = MemoryAmount(
        share=0.1
    )  # draft_model: its pool, as --kv-memory has it
    prompt_lookup_min: int = Field(2, ge=1, le=16)  # ngram: tokens that have to agree
    prompt_lookup_max: int = Field(4, ge=1, le=16)  # ngram: tokens that are looked for first
    share_outputs: bool = False  # ngram: look in the recent outputs of the same cache namespace too

    @model_validator(mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            content = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON object ({error})") from None
        if not isinstance(content, dict):
            raise ValueError("must be a JSON object")
        return content

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError('must have a "model" with the method draft_model, and with no other')
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("must have prompt_lookup_min <= prompt_lookup_max")
        if self.branches > 1 and self.method == "ngram":
            raise ValueError('must not have "branches" with the method ngram')
        return self
