"""What a plan has to know of a model, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes a quantised weight takes with its share of a group's scale and minimum (groups of 32), by bits.
_QUANTISED_BYTES = {8: 1.125, 4: 0.625}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its file has it."""

    name: str  # what clients call it unless told otherwise
    weights: str  # the file's own format, for people: "Q4_1", "bfloat16"
    weight_bits: int | None  # of a file that is quantised: 4 or 8, the nearest that is not fewer; None otherwise
    parameters: int
    max_position: int  # tokens of the longest context
    kv_numbers_per_token: int  # keys and values of one token over all layers
    head_dim: int  # numbers of a key or value that share a scale where these are in int8

    def kv_token_bytes(self, kv_dtype: str) -> int:
        """Bytes of one token's keys and values; in int8 with a float32 scale for each of every head."""
        numbers = self.kv_numbers_per_token
        return numbers + 4 * numbers // self.head_dim if kv_dtype == "int8" else numbers * ITEM_BYTES[kv_dtype]

    def weight_bytes(self, quantization: str, dtype: str) -> int:
        """Bytes of the weights served in that format, an estimate."""
        bits = {"int8": 8, "int4": 4, "stored": self.weight_bits}.get(quantization)
        return int(self.parameters * (_QUANTISED_BYTES[bits] if bits is not None else ITEM_BYTES[dtype]))
