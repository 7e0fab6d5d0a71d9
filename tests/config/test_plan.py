"""What settings become on invented machines with invented models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from config.errors import ConfigError
from config.facts import ModelFacts
from config.hardware import CudaDevice, Hardware
from config.plan import Plan, resolve, resolve_without_kernels
from config.settings import Settings

GIB = 1 << 30
LAPTOP = Hardware("CPU", cores=4, memory_bytes=16 * GIB, free_bytes=8 * GIB, isa=frozenset({"avx2"}))
SERVER = Hardware("Xeon", cores=32, memory_bytes=256 * GIB, free_bytes=200 * GIB, isa=frozenset({"avx2", "amx_bf16"}))
GPU = CudaDevice("H200", memory_bytes=140 * GIB, free_bytes=100 * GIB, capability=(9, 0))
GPU_SERVER = Hardware("Xeon", 32, 256 * GIB, 200 * GIB, frozenset({"avx2"}), (GPU,), triton=True)

# 30 layers of 3 KV heads of 64: 11,520 numbers a token, 45 KiB in float32.
SMALL = ModelFacts(
    "small", "Q4_1", 4, parameters=135_000_000, max_position=8192, kv_numbers_per_token=11_520, head_dim=64
)
# 32 layers of 8 KV heads of 128: 65,536 numbers a token, 128 KiB in bfloat16.
LARGE = ModelFacts("large", "bfloat16", None, 8_000_000_000, 131_072, 65_536, 128)


def plan(hardware: Hardware = LAPTOP, facts: ModelFacts = SMALL, **settings: Any) -> Plan:
    return resolve(Settings.load(settings, {}), hardware, facts)


def refusal(hardware: Hardware = LAPTOP, facts: ModelFacts = SMALL, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(hardware, facts, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_decision_has_a_reason_and_a_line_for_people() -> None:
    for decided in (plan(), plan(SERVER, LARGE), plan(GPU_SERVER, LARGE)):
        rows = decided.rows()
        assert len({name for name, _, _ in rows}) == len(rows)
        assert all(name and value and reason for name, value, reason in rows)


def test_the_plan_is_json() -> None:
    decided = json.loads(json.dumps(plan().as_dict()))
    assert decided["num_pages"] * decided["page_bytes"] == decided["kv_bytes"]
    assert decided["reasons"]["threads"]


def test_the_dtype_is_what_the_processor_computes_in() -> None:
    assert plan(LAPTOP).dtype == "float32"
    assert plan(SERVER).dtype == "bfloat16"
    assert plan(GPU_SERVER).dtype == "bfloat16"
    assert plan(SERVER, dtype="float32").dtype == "float32"


def test_keys_and_values_are_kept_in_as_few_bits_as_the_arithmetic_has() -> None:
    assert plan(LAPTOP, SMALL).kv_dtype == "int8"  # quantised weights
    assert plan(LAPTOP, SMALL).page_bytes == (11_520 + 11_520 // 64 * 4) * 16  # a scale for each head of each token
    assert plan(LAPTOP, SMALL, quantization="none").kv_dtype == "float32"
    assert plan(LAPTOP, SMALL, attention_backend="torch").kv_dtype == "float32"
    assert plan(SERVER, SMALL).kv_dtype == "bfloat16"  # it has tile registers
    assert plan(SERVER, LARGE).kv_dtype == "bfloat16"
    assert plan(GPU_SERVER, SMALL).kv_dtype == "bfloat16"
    decided = plan(SERVER, kv_cache_dtype="float32")
    assert (decided.kv_dtype, decided.page_bytes) == ("float32", 11_520 * 4 * 16)
    assert plan(SERVER, LARGE, kv_cache_dtype="int8").kv_dtype == "int8"
    assert "needs the CPU kernels" in refusal(LAPTOP, kv_cache_dtype="int8", attention_backend="torch")


def test_without_the_kernels_the_plan_is_that_of_torch_and_says_why() -> None:
    for asked in ({}, {"kv_cache_dtype": "float32"}, {"attention_backend": "cpu", "kv_memory": "128MiB"}):
        found = resolve_without_kernels(Settings.load(asked, {}), LAPTOP, SMALL)
        assert found.reasons["attention_backend"] == "the CPU kernels could not be built"
        torch = plan(LAPTOP, SMALL, **asked | {"attention_backend": "torch"})
        assert found == replace(torch, reasons=found.reasons)
        assert (found.attention_backend, found.quantization, found.speculation) == ("torch", "none", None)
    for refused in ({"kv_cache_dtype": "int8"}, {"quantization": "int8"}):
        with pytest.raises(ConfigError, match="CPU kernels"):
            resolve_without_kernels(Settings.load(refused, {}), LAPTOP, SMALL)


def test_a_gpu_is_taken_when_there_is_one_unless_the_cpu_is_asked_for() -> None:
    assert plan(GPU_SERVER).device == "cuda"
    assert plan(GPU_SERVER, device="cpu").device == "cpu"
    assert plan(LAPTOP).device == "cpu"
    assert "no CUDA device" in refusal(LAPTOP, device="cuda")


def test_what_only_the_cpu_can_do_is_refused_on_cuda() -> None:
    assert "--device cpu" in refusal(GPU_SERVER, attention_backend="cpu")
    assert "needs the CPU kernels" in refusal(GPU_SERVER, quantization="int8")
    assert plan(GPU_SERVER).attention_backend == "torch"


def test_deterministic_takes_other_kernels_on_cuda_and_none_elsewhere() -> None:
    decided = plan(GPU_SERVER, LARGE, deterministic="true")
    assert decided.attention_backend == "triton"
    assert "--deterministic" in decided.reasons["attention_backend"]
    assert plan(SERVER, LARGE, deterministic="true") == plan(SERVER, LARGE)
    assert plan(GPU_SERVER, device="cpu", deterministic="true") == plan(GPU_SERVER, device="cpu")


def test_deterministic_is_refused_on_cuda_where_it_cannot_hold() -> None:
    assert "pip install triton" in refusal(replace(GPU_SERVER, triton=False), deterministic="true")
    assert "--attention-backend torch" in refusal(GPU_SERVER, deterministic="true", attention_backend="torch")
    assert "needs the CPU kernels" in refusal(GPU_SERVER, deterministic="true", quantization="int8")
    assert plan(replace(GPU_SERVER, triton=False)).attention_backend == "torch"


def test_pages_are_whole_tiles_of_the_cpu_kernels() -> None:
    assert "multiple of 16" in refusal(block_size="24")
    assert plan(block_size="24", attention_backend="torch").page_size == 24


def test_weights_stay_as_the_file_has_them() -> None:
    assert plan(LAPTOP, SMALL).quantization == "stored"
    assert plan(GPU_SERVER, SMALL).quantization == "none"
    assert plan(LAPTOP, SMALL, attention_backend="torch").quantization == "none"
    assert plan(SERVER, LARGE).quantization == "none"
    assert plan(SERVER, LARGE, quantization="int8").quantization == "int8"
    assert plan(LAPTOP, SMALL, quantization="none").quantization == "none"


def test_what_the_cpu_kernels_cannot_compute_is_left_to_torch() -> None:
    assert plan(LAPTOP, dtype="float16").attention_backend == "torch"
    assert plan(LAPTOP, kv_cache_dtype="float16").attention_backend == "torch"
    assert "no float16" in refusal(LAPTOP, dtype="float16", attention_backend="cpu")
    assert "needs the CPU kernels" in refusal(LAPTOP, quantization="int8", attention_backend="torch")


def test_threads_are_the_usable_cores() -> None:
    assert plan(LAPTOP).threads == 4
    assert plan(LAPTOP, threads="2").threads == 2


def test_the_pool_takes_a_quarter_of_what_is_free_after_the_weights() -> None:
    decided = plan(LAPTOP)
    left = LAPTOP.free_bytes - decided.weight_bytes
    assert left * 0.24 < decided.kv_bytes <= left * 0.25


def test_the_pool_is_no_larger_than_every_sequence_at_its_longest_needs() -> None:
    decided = plan(SERVER, max_model_len="160", max_num_seqs="3")
    assert decided.num_pages == 3 * 10


@pytest.mark.parametrize(("given", "size"), [("2GiB", 2 * GIB), ("50%", 99 * GIB)])
def test_the_pool_is_as_large_as_asked(given: str, size: int) -> None:
    decided = plan(SERVER, kv_memory=given)
    assert size - decided.page_bytes - GIB < decided.kv_bytes <= size + GIB
    assert decided.kv_bytes % decided.page_bytes == 0


def test_a_context_that_was_not_asked_for_shrinks_to_what_the_pool_holds() -> None:
    decided = plan(LAPTOP, LARGE, quantization="int4")
    assert 1024 <= decided.max_model_len == decided.num_pages * 16 < 131_072
    assert "131072" in decided.reasons["max_model_len"]


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_the_two_ways_out() -> None:
    message = refusal(LAPTOP, kv_memory="64MiB", max_model_len="8192", kv_cache_dtype="float32")
    assert message == (
        "the KV pool holds 1456 tokens, less than one context of 8192: "
        "raise --kv-memory to 360MiB, or lower --max-model-len to 1456"
    )
    assert plan(LAPTOP, kv_memory="360MiB", max_model_len="8192").max_model_len == 8192
    assert plan(LAPTOP, kv_memory="64MiB", max_model_len="1456").max_model_len == 1456


def test_a_pool_too_small_for_any_useful_context_is_refused() -> None:
    assert "lower --max-model-len to 176" in refusal(LAPTOP, kv_memory="8MiB", kv_cache_dtype="float32")
    assert plan(LAPTOP, kv_memory="8MiB", max_model_len="176", kv_cache_dtype="float32").num_pages == 11


def test_a_pool_smaller_than_a_page_is_refused() -> None:
    assert "does not hold one page of 16 tokens (720 KiB)" in refusal(
        LAPTOP, kv_memory="512KiB", kv_cache_dtype="float32"
    )


def test_a_pool_larger_than_the_memory_is_refused() -> None:
    assert "left after the weights" in refusal(LAPTOP, kv_memory="9GiB")


def test_weights_larger_than_the_memory_are_refused() -> None:
    assert refusal(LAPTOP, LARGE).startswith("the weights need 29.8 GiB and 8 GiB are free")


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert refusal(max_model_len="8193") == (
        "--max-model-len 8193 is longer than the model's context: use 8192 or less"
    )


def test_more_sequences_than_a_step_has_tokens_are_refused() -> None:
    assert "raise --max-num-batched-tokens to 600 or more" in refusal(max_num_seqs="600")
    assert plan(max_num_batched_tokens="64").max_num_seqs == 64
