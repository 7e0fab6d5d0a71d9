"""Field types shared by the request models: strict, bounded, and finite.

JSON has one kind of number, so `1.0` is taken as the integer 1 wherever an integer is wanted; `"1"`, `true` and `1.5`
are not. `null` always means "not given". Knows nothing of the model being served: limits that depend on it are in
`server.protocol.checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_EXACT_FLOAT = 2**53  # integers beyond it were already rounded when the JSON was read
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_BIAS_ENTRIES = 4096
MAX_STOP_TOKENS = 256
MAX_ID_DIGITS = 10


class Fields(BaseModel):
    """Base of every request model. Fields it does not know are kept in `model_extra`, for `checks` to judge."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


def whole(value: object) -> object:
    """`1.0` as 1; anything else as it is, for pydantic to refuse."""
    if type(value) is float and value.is_integer() and abs(value) <= MAX_EXACT_FLOAT:
        return int(value)
    return value


def _stops(value: object) -> object:
    if value is None or isinstance(value, str):
        value = [] if value is None else [value]
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if len(value) > MAX_STOPS:
        raise PydanticCustomError("stop_count", f"must hold at most {MAX_STOPS} strings")
    if any(not stop for stop in value):
        raise PydanticCustomError("stop_empty", "must not hold an empty string")
    if any(len(stop) > MAX_STOP_CHARS for stop in value):
        raise PydanticCustomError("stop_length", f"must hold strings of at most {MAX_STOP_CHARS} characters")
    return value


def _biases(value: object) -> object:
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "must be an object from token ids to numbers")
    if len(value) > MAX_BIAS_ENTRIES:
        raise PydanticCustomError("bias_count", f"must hold at most {MAX_BIAS_ENTRIES} entries")
    return {_token_id(key): _bias(number) for key, number in value.items()}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS and str(int(key)) == key):
        raise PydanticCustomError("bias_key", "must have token ids, written as whole numbers, for keys")
    return int(key)


def _bias(number: object) -> float:
    if type(number) not in (int, float):
        raise PydanticCustomError("bias_value_type", "must have numbers for values")
    bias = float(number)  # type: ignore[arg-type]
    if not -100 <= bias <= 100:
        raise PydanticCustomError("bias_value", "must have values from -100 to 100")
    return bias


Int = Annotated[int, BeforeValidator(whole)]
Int64 = Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
ModelName = Annotated[str, Field(min_length=1, max_length=1024)]
Label = Annotated[str, Field(max_length=512)]
Stops = Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str])]
Biases = Annotated[dict[int, float], BeforeValidator(_biases)]
TokenIds = Annotated[list[Int], Field(max_length=MAX_STOP_TOKENS)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
JSONObject = dict[str, Any]


class StreamOptions(Fields):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="one more chunk at the end, with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")
    include_obfuscation: bool | None = Field(None, description="only false or null: chunks are not padded")


class JsonSchemaFormat(Fields):
    """OpenAI's wrapping of a schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Fields):
    """vLLM's way to ask for a form, of which there must be exactly one."""

    json_: Annotated[Any, Field(alias="json", description="a JSON schema, as an object or as text")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1, description="in Lark or GBNF")] | None = None
    json_object: bool | None = None
    structural_tag: Any | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[str, Field(min_length=1)] | None = None


class SamplingFields(Fields):
    """What every request that generates has."""

    model: ModelName
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1 are off")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logit_bias: Biases | None = None
    seed: Int64 | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[list[Int], Field(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=128)] | None = None
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    priority: Int64 | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    stream: bool | None = None
    user: Label | None = None


class GenerationFields(SamplingFields):
    """What completions and chat completions have in common besides."""

    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    stop: Stops | None = None
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    timings: bool | None = Field(None, description="how long the parts of the work took, in the answer")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
