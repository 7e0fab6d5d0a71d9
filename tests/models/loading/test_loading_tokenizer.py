from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.integrations.gguf import convert_gguf_tokenizer

from models.errors import CorruptModelError, UnsupportedModelError
from models.loading import converted_tokenizer
from models.loading.checkpoint import open_checkpoint
from models.loading.gguf_file import GgufCheckpoint, open_gguf
from models.loading.source import Source, resolve_source
from models.loading.tokenizer import LoadedTokenizer, load_tokenizer

Write = Callable[..., Path]

TEXTS = [
    "",
    " ",
    "Hello, world! It's 5 o'clock and they'LL say WE'VE lost.",
    "   leading and trailing   ",
    "a   b\t\tc\n\n\n  d\r\n\r\ne \n",
    "1 12 123 1234 12345678901 3.14159 1,000.50 0x1F 2024-05-06",
    "½ ² Ⅷ ٣٤٥ 一二三 ①②",
    "Ünïcödé naïve café cafe\u0301 e\u0301\u0302 ﬁ Ǆ ß ẞ",
    "日本語のテキスト。中文文本,한국어 텍스트 ไทย မြန်မာ हिन्दी עברית العربية",
    "emoji 😀 👨‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
    "def f(x: int) -> dict[str, int]:\n    return {\"a\": x ** 2}  # squared\n\tif x != 0:\n        pass\n",
    "<div class='a'>&nbsp;</div> https://example.org/a?b=c&d=%20e me@example.org",
    "\u00a0no-break\u3000ideographic\u2028line\u200bzero\ufeffbom",
    "CamelCaseWords snake_case_words SCREAMING-KEBAB... ?!?! ---- ==== ////",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|not_a_token|>",
    "\x00\x01\x7f control",
]  # fmt: skip


def opened(path: Path) -> GgufCheckpoint:
    return open_gguf(path, path.stem)


@pytest.fixture(scope="module")
def default() -> GgufCheckpoint:
    source = resolve_source(None)
    return open_gguf(source.path, source.name)


@pytest.fixture(scope="module")
def vocabulary(default: GgufCheckpoint) -> dict[str, Any]:
    """The first 4,000 tokens of the default model: a byte-level vocabulary closed under its merges."""
    tokens = default.metadata["tokenizer.ggml.tokens"][:4000]
    known = set(tokens)
    merges = [merge for merge in default.metadata["tokenizer.ggml.merges"] if merge.replace(" ", "") in known]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": default.metadata["tokenizer.ggml.token_type"][:4000].tolist(),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def ids(tokenizer: LoadedTokenizer, text: str) -> list[int]:
    result: list[int] = tokenizer.tokenizer.encode(text).ids
    return result


def reference(metadata: dict[str, Any]) -> Tokenizer:
    """What transformers makes of a GGUF file's metadata."""
    keys = ("tokens", "merges", "token_type")
    stated = {key: list(metadata[f"tokenizer.ggml.{key}"]) for key in keys}
    stated |= {"tokenizer_type": "gpt2", "pre_tokenizer_type": metadata["tokenizer.ggml.pre"]}
    backend: Tokenizer = convert_gguf_tokenizer("llama", stated)[0]
    return backend


# GGUF files


def test_the_default_tokenizer_gives_the_ids_of_transformers(default: GgufCheckpoint) -> None:
    loaded = load_tokenizer(default)
    expected = reference(default.metadata)
    # Transformers does not split digits off for this family, which shows only after more than one space.
    for text in (text for text in TEXTS if "²" not in text):
        assert ids(loaded, text) == expected.encode(text).ids, text
        assert loaded.tokenizer.decode(ids(loaded, text), skip_special_tokens=False) == text


def test_the_default_tokenizer_splits_digits_as_its_model_was_trained_to(default: GgufCheckpoint) -> None:
    loaded = load_tokenizer(default)
    for text, recorded in (  # from llama.cpp
        ("  12", [256, 33, 34]),
        ("a  12 b", [81, 256, 33, 34, 278]),
        ("1  2  3", [33, 256, 34, 256, 35]),
        ("tabs\t\t12\t\tx", [100, 7366, 1656, 33, 34, 197, 197, 104]),
        ("price: $  1,000.50", [17517, 42, 1885, 256, 33, 28, 32, 32, 32, 30, 37, 32]),
        ("½ ² Ⅷ ٣٤ 一二",
         [16738, 216, 19133, 216, 173, 223, 117, 216, 164, 113, 164, 114, 216, 22924, 16736, 230]),
    ):  # fmt: skip
        assert ids(loaded, text) == recorded, text


def test_the_default_tokenizer_says_what_a_server_must_know(default: GgufCheckpoint) -> None:
    loaded = load_tokenizer(default)
    assert loaded.bos_token_id == 1
    assert loaded.eos_token_ids == (2, 0)
    assert not loaded.add_bos
    assert loaded.vocab_size == 49152
    assert loaded.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert loaded.chat_template is not None
    assert "<|im_start|>" in loaded.chat_template


def test_the_default_tokenizer_loads_without_torch_and_transformers(default: GgufCheckpoint) -> None:
    code = (
        "import sys; from models.loading.checkpoint import open_checkpoint;"
        "from models.loading.source import resolve_source; from models.loading.tokenizer import load_tokenizer;"
        "load_tokenizer(open_checkpoint(resolve_source(None)));"
        "sys.exit(str([m for m in ('torch', 'transformers') if m in sys.modules] or ''))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip() == ""


@pytest.mark.parametrize("family", ["gpt-2", "llama-bpe", "tekken"])
def test_a_family_cuts_text_like_transformers(family: str, vocabulary: dict[str, Any], write_gguf: Write) -> None:
    metadata = {**vocabulary, "tokenizer.ggml.pre": family, "tokenizer.ggml.add_bos_token": False}
    loaded = load_tokenizer(opened(write_gguf(metadata=metadata)))
    expected = reference(metadata)
    for text in TEXTS:
        assert ids(loaded, text) == expected.encode(text).ids, text


def test_the_qwen_family_composes_and_cuts_like_its_own_tokenizer(
    vocabulary: dict[str, Any], write_gguf: Write
) -> None:
    loaded = load_tokenizer(opened(write_gguf(metadata={**vocabulary, "tokenizer.ggml.pre": "qwen2"})))
    tokens, merges = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.merges"]
    expected = transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        additional_special_tokens=tokens[:17],
    )
    for text in TEXTS:
        assert ids(loaded, text) == expected(text)["input_ids"], text
    assert ids(loaded, "cafe\u0301") == ids(loaded, "café")


def test_a_whole_word_is_taken_before_its_merges_only_in_families_that_do(
    vocabulary: dict[str, Any], write_gguf: Write
) -> None:
    word = "zqzqzq"  # no merges lead to it
    metadata = {**vocabulary, "tokenizer.ggml.tokens": [*vocabulary["tokenizer.ggml.tokens"], word]}
    metadata["tokenizer.ggml.token_type"] = [*vocabulary["tokenizer.ggml.token_type"], 1]
    for family, whole in (("llama-bpe", True), ("gpt-2", False)):
        metadata |= {"tokenizer.ggml.pre": family, "tokenizer.ggml.add_bos_token": False}
        loaded = load_tokenizer(opened(write_gguf(metadata=metadata)))
        assert (ids(loaded, word) == [4000]) == whole


@pytest.mark.parametrize(
    ("family", "flag", "expected"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_the_first_token_is_added_when_the_file_or_else_the_family_says_so(
    family: str, flag: bool | None, expected: bool, vocabulary: dict[str, Any], write_gguf: Write
) -> None:
    metadata = {**vocabulary, "tokenizer.ggml.pre": family, "tokenizer.ggml.add_bos_token": flag}
    loaded = load_tokenizer(opened(write_gguf(metadata=metadata)))
    assert loaded.add_bos == expected
    assert ids(loaded, "a")[:-1] == ([1] if expected else [])
    assert loaded.tokenizer.encode("a", add_special_tokens=False).ids == ids(loaded, "a")[-1:]


def test_control_and_user_defined_tokens_stay_whole_and_only_control_is_special(
    vocabulary: dict[str, Any], write_gguf: Write
) -> None:
    metadata = {**vocabulary, "tokenizer.ggml.pre": "smollm"}
    metadata["tokenizer.ggml.tokens"] = [*vocabulary["tokenizer.ggml.tokens"], "<think>", "<two words>"]
    metadata["tokenizer.ggml.token_type"] = [*vocabulary["tokenizer.ggml.token_type"], 4, 4]
    loaded = load_tokenizer(opened(write_gguf(metadata=metadata)))
    assert ids(loaded, "<think><two words><|im_end|>") == [4000, 4001, 2]
    assert loaded.tokenizer.decode([4000, 4001, 2]) == "<think><two words>"


def test_a_vocabulary_that_contradicts_itself_is_said_so(vocabulary: dict[str, Any], write_gguf: Write) -> None:
    metadata = {**vocabulary, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["no such"]}
    with pytest.raises(CorruptModelError, match="vocabulary is damaged"):
        load_tokenizer(opened(write_gguf(metadata=metadata)))


# Formats that transformers converts


@pytest.fixture
def sentencepiece(write_gguf: Write) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "abc", "▁abc", "bc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return write_gguf(metadata=metadata)


def test_a_sentencepiece_vocabulary_is_converted_once_and_then_kept(
    sentencepiece: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_tokenizer(opened(sentencepiece))
    expected = transformers.AutoTokenizer.from_pretrained(sentencepiece.parent, gguf_file=sentencepiece.name)
    for text in ("abc ab a", "  abc", "zé😀", ""):
        assert ids(first, text) == expected(text)["input_ids"]
    assert first.add_bos
    assert first.bos_token_id == 1
    assert first.eos_token_ids == (2,)
    assert len(list(cache_folder.glob("*/tokenizers/*.json"))) == 1

    def fail(folder: str, gguf_file: str | None) -> str:
        raise AssertionError("converted again")

    monkeypatch.setattr(converted_tokenizer, "_convert", fail)
    again = load_tokenizer(opened(sentencepiece))
    assert again.tokenizer.to_str() == first.tokenizer.to_str()


def test_a_kept_tokenizer_that_was_cut_short_is_converted_again(sentencepiece: Path, cache_folder: Path) -> None:
    first = load_tokenizer(opened(sentencepiece))
    [kept] = cache_folder.glob("*/tokenizers/*.json")
    kept.write_bytes(kept.read_bytes()[:1000])
    assert load_tokenizer(opened(sentencepiece)).tokenizer.to_str() == first.tokenizer.to_str()


def test_a_byte_level_family_that_is_not_known_is_converted(vocabulary: dict[str, Any], write_gguf: Write) -> None:
    metadata = {**vocabulary, "tokenizer.ggml.pre": "gpt-4o"}
    loaded = load_tokenizer(opened(write_gguf(metadata=metadata)))
    for text in TEXTS:
        assert ids(loaded, text) == reference(metadata).encode(text).ids, text


def test_a_vocabulary_that_nothing_can_read_is_said_so_in_one_line(write_gguf: Write) -> None:
    metadata = {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(UnsupportedModelError, match=r"tokenizer of .* cannot be read") as error:
        load_tokenizer(opened(write_gguf(metadata=metadata)))
    assert "\n" not in str(error.value)


# Hugging Face folders

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False},
    "pad_token": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose tokenizer.json is byte-level, adds <s> before a text, and pads and truncates."""
    path = tmp_path / "folder"
    config = transformers.LlamaConfig(**CONFIG)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").unlink()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "he", "ll", "<|im_end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return path


def load(folder: Path, **tokenizer_config: Any) -> LoadedTokenizer:
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENIZER_CONFIG, **tokenizer_config}))
    return load_tokenizer(open_checkpoint(Source("folder", folder, folder.name)))


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"added_tokens_decoder": {"261": {"content": "<tool>", "special": False, "normalized": False}}},
        {"pad_token": "<pad>"},
    ],
)
def test_a_folder_gives_the_ids_of_transformers(stated: dict[str, Any], folder: Path) -> None:
    loaded = load(folder, **stated)
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("hello", "", "<s>hello</s>", "a <tool> <pad> b", "é😀 hell"):
        assert ids(loaded, text) == expected(text, truncation=False, padding=False)["input_ids"], text
    assert loaded.add_bos == (ids(loaded, "a")[0] == 0)
    assert loaded.bos_token_id == 0
    assert loaded.vocab_size == len(expected)


def test_a_folders_tokenizer_neither_truncates_nor_pads(folder: Path) -> None:
    loaded = load(folder)
    assert len(ids(loaded, "a")) == 2
    assert len(ids(loaded, "a b c d e f g")) == 14


def test_special_tokens_may_be_text_or_objects_or_in_a_file_of_their_own(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<s>"}, "eos_token": "x"}))
    assert load(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}


def test_end_tokens_are_guessed_by_spelling_only_without_a_generation_configuration(folder: Path) -> None:
    end_of_turn = 260
    assert load(folder).eos_token_ids == (1, end_of_turn)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    assert load(folder).eos_token_ids == (5, 1)


def test_a_chat_template_comes_from_its_own_file_before_the_tokenizers_configuration(folder: Path) -> None:
    assert load(folder).chat_template is None
    assert load(folder, chat_template="one").chat_template == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert load(folder, chat_template=named).chat_template == "plain"
    (folder / "chat_template.jinja").write_text("own")
    assert load(folder).chat_template == "own"


def test_an_older_vocabulary_is_converted_and_kept(folder: Path, cache_folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in content["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    stated = {"tokenizer_class": "Qwen2Tokenizer", "unk_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENIZER_CONFIG, **stated}))
    tokenizer = converted_tokenizer.converted_tokenizer("key", str(folder))
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("hello</s>").ids == expected("hello</s>")["input_ids"]
    assert len(list(cache_folder.glob("*/tokenizers/*.json"))) == 1


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_said_so(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json cannot be read"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CorruptModelError, match="has no tokenizer"):
        load(folder)


def test_several_threads_may_use_a_tokenizer_at_once(default: GgufCheckpoint) -> None:
    loaded = load_tokenizer(default)
    expected = [ids(loaded, text) for text in TEXTS]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: ids(loaded, text), TEXTS * 20)) == expected * 20
