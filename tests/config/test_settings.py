"""Where a setting's value comes from, and what is said when it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.flags import Parser, add_settings, refuse_unknown
from config.settings import Settings, flag_of
from config.sizes import MemoryAmount


def parse(*arguments: str) -> dict[str, object]:
    parser = Parser(prog="octavo serve")
    add_settings(parser)
    namespace, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown)
    return vars(namespace)


def load(*arguments: str, **environment: str) -> Settings:
    return Settings.load(parse(*arguments), environment)


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **environment)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "octavo.yaml"


def test_nothing_given_leaves_every_default() -> None:
    assert load() == Settings()


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(file: Path) -> None:
    file.write_text("port: 1\nmax-num-seqs: 1\nblock-size: 1\n")
    settings = load("--config", str(file), "--port", "3", OCTAVO_PORT="2", OCTAVO_MAX_NUM_SEQS="2")
    assert (settings.port, settings.max_num_seqs, settings.block_size) == (3, 2, 1)


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    file.write_text("port: 1\n")
    assert load(OCTAVO_CONFIG=str(file)).port == 1


def test_an_empty_file_is_no_settings(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert load("--config", str(file)).port == Settings().port


def test_file_keys_may_be_written_with_underscores(file: Path) -> None:
    file.write_text("max_model_len: 99\n")
    assert load("--config", str(file)).max_model_len == 99


# One value of every setting, as a string, that is not the default.
OTHER_VALUES = {
    "model": "m.gguf",
    "served_model_name": "a",
    "max_model_len": "99",
    "dtype": "float16",
    "quantization": "int8",
    "device": "cuda",
    "threads": "3",
    "attention_backend": "torch",
    "deterministic": "true",
    "chat_template": "t.jinja",
    "kv_memory": "1GiB",
    "kv_cache_dtype": "float16",
    "block_size": "32",
    "enable_prefix_caching": "false",
    "kv_offload": "1GiB",
    "kv_cache_dir": "/var/cache/octavo",
    "cache_isolation": "key",
    "max_num_seqs": "9",
    "max_num_batched_tokens": "99",
    "max_queued_requests": "9",
    "max_queued_tokens": "9",
    "max_queue_delay": "9",
    "scheduling_policy": "priority",
    "speculative_config": '{"method": "ngram"}',
    "speculative_acceptance": "rejection",
    "host": "0.0.0.0",
    "port": "9",
    "api_key": "k",
    "admin_api_key": "k",
    "allowed_origins": "https://app.example",
    "api_key_file": "keys.yaml",
    "ssl_certfile": "cert.pem",
    "ssl_keyfile": "key.pem",
    "open_metrics": "true",
    "max_logprobs": "9",
    "tool_call_parser": "mistral",
    "reasoning_parser": "think",
    "grammar_timeout": "9",
    "max_grammar_size": "1MiB",
    "strict_fields": "true",
    "max_body_size": "1MiB",
    "request_timeout": "9",
    "shutdown_timeout": "1.5",
    "metrics_compat": "vllm",
    "log_level": "debug",
    "log_format": "json",
    "log_prompts": "true",
    "otlp_endpoint": "http://collector:4318",
    "step_timeout": "9",
    "journal_file": "j",
    "cache_dir": "/var/cache/octavo",
}


def test_every_setting_has_a_flag_an_environment_twin_and_a_file_key(file: Path) -> None:
    assert set(OTHER_VALUES) == set(Settings.model_fields) - {"config"}
    for name, value in OTHER_VALUES.items():
        if name == "model":
            arguments = [value]
        elif value in ("true", "false"):
            arguments = [flag_of(name) if value == "true" else flag_of(name).replace("--", "--no-", 1)]
        else:
            arguments = [flag_of(name), value]
        by_flag = load(*arguments)
        assert getattr(by_flag, name) != getattr(Settings(), name), name
        assert load(**{f"OCTAVO_{name.upper()}": value}) == by_flag
        file.write_text(f"{name.replace('_', '-')}: {value}\n")
        by_file = load("--config", str(file))
        assert by_file.model_copy(update={"config": None}) == by_flag


def test_a_wrong_speculative_config_is_refused_by_the_name_of_its_key() -> None:
    for text, named in (
        ('{"method": "ngrams"}', "--speculative-config method must be"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be greater"),
        ('{"method": "draft_model"}', '"model"'),
        ('{"method": "self", "depth": 1}', "--speculative-config depth"),
        ("[]", "must be a JSON object"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            load("--speculative-config", text)


def test_several_names_are_words_on_the_command_line_commas_in_the_environment_and_a_list_in_the_file(
    file: Path,
) -> None:
    file.write_text("served-model-name: [a, b]\n")
    by_flag = load("--served-model-name", "a", "b")
    assert by_flag.served_model_name == ("a", "b")
    assert load("--served-model-name", "a", "--served-model-name", "b") == by_flag
    assert load(OCTAVO_SERVED_MODEL_NAME="a, b") == by_flag
    assert load("--config", str(file)).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2GiB", MemoryAmount(bytes=2 << 30)),
        ("1.5 gib", MemoryAmount(bytes=3 << 29)),
        ("512m", MemoryAmount(bytes=512 << 20)),
        ("2GB", MemoryAmount(bytes=2 * 10**9)),
        ("4096", MemoryAmount(bytes=4096)),
        ("70%", MemoryAmount(share=0.7)),
    ],
)
def test_memory_is_a_size_or_a_share(text: str, amount: MemoryAmount) -> None:
    assert load("--kv-memory", text).kv_memory == amount


@pytest.mark.parametrize("text", ["", "much", "2XB", "-1GiB", "0", "0%", "101%", "1e9"])
def test_memory_written_otherwise_is_refused(text: str) -> None:
    assert refusal(f"--kv-memory={text}").startswith("--kv-memory must be")


def test_a_wrong_value_is_named_with_its_source(file: Path) -> None:
    file.write_text("port: many\n")
    assert refusal("--otlp-endpoint", "collector:4318").startswith("--otlp-endpoint must be a URL such as http://")
    assert refusal("--port", "99999") == "--port must be less than or equal to 65535, not '99999'"
    assert refusal(OCTAVO_DEVICE="gpu") == (
        "--device must be 'auto', 'cpu' or 'cuda', not 'gpu' (from the environment)"
    )
    assert refusal("--config", str(file)) == f"--port must be a valid integer, not 'many' (in {file})"


@pytest.mark.parametrize(
    "origin", ["", "nonsense", "https://", "https://app.example/", "HTTPS://app.example", "https://*.example"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    message = refusal("--allowed-origins", origin, "*")
    assert message.startswith("--allowed-origins must be * or such as https://app.example: ")
    assert repr(origin) in message


def test_origins_are_taken_as_browsers_write_them() -> None:
    origins = ("*", "null", "http://localhost:3000", "https://app.example", "http://[::1]:80", "moz-extension://1-2")
    assert load("--allowed-origins", *origins).allowed_origins == origins
    assert load(OCTAVO_ALLOWED_ORIGINS="").allowed_origins == ()


def test_a_key_is_never_repeated_in_a_message_or_in_a_log(file: Path) -> None:
    file.write_text("api-key: {secret: 1}\n")
    assert "secret" not in refusal("--config", str(file))
    assert "secret" not in repr(load("--api-key", "secret"))


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--prot", "--port"),
        ("--max-model-length", "--max-model-len"),
        ("--no-prefix-caching", "--enable-prefix-caching"),
        ("--gpu-memory-utilization=0.9", "--kv-memory"),
    ],
)
def test_an_unknown_flag_brings_a_suggestion(flag: str, meant: str) -> None:
    assert refusal(flag) == f"unknown flag {flag.split('=')[0]}: did you mean {meant}?"


def test_an_unknown_flag_like_no_other_points_to_the_list() -> None:
    assert refusal("--frobnicate", "1") == "unknown flag --frobnicate: `octavo serve --help` lists the flags"


def test_flags_are_not_abbreviated() -> None:
    assert refusal("--max-model", "3").startswith("unknown flag --max-model:")


def test_a_second_model_is_refused() -> None:
    assert refusal("a", "b") == "unexpected argument 'b': one MODEL at most"


def test_a_model_behind_a_key_does_not_become_a_key(tmp_path: Path) -> None:
    said = f"--api-key takes every value after it: put MODEL {tmp_path} before it"
    assert refusal("--api-key", "secret", str(tmp_path)) == said


def test_a_mistyped_environment_variable_brings_a_suggestion() -> None:
    assert refusal(OCTAVO_PRT="1") == "unknown environment variable OCTAVO_PRT: did you mean OCTAVO_PORT?"


def test_a_mistyped_file_key_brings_a_suggestion(file: Path) -> None:
    file.write_text("max-seqs: 1\n")
    assert refusal("--config", str(file)) == f"--config {file}: unknown key max-seqs: did you mean max-num-seqs?"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("port: [", "is not YAML"),
        ("port: !!int x", "is not YAML"),
        ("just words", "must hold `setting: value` lines"),
        ("config: x", "unknown key config"),
    ],
)
def test_a_file_that_is_no_list_of_settings_is_refused(file: Path, content: str, complaint: str) -> None:
    file.write_text(content)
    assert complaint in refusal("--config", str(file))


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    assert refusal("--config", str(file)) == f"--config {file}: cannot be read: no such file or directory"
