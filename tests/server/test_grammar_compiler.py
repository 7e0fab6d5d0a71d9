"""Grammars are compiled within limits, and a compilation nobody waits for ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from scheduler.errors import ConstraintFailed
from server.detokenize import Decoding
from server.errors import InvalidRequest, Overloaded, UnsupportedField
from server.structured.compiler import GrammarCompiler, GrammarLimits, reason_of
from server.structured.constraint import GrammarConstraint
from server.structured.grammar import Grammar, json_of, one_of, regex
from server.structured.vocabulary import Vocabulary

EOS = 1


def json_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(json_of(schema), "field")


def slow(number: int) -> Grammar:
    """Takes more than any limit: what both divide is found by an automaton of millions of states."""
    both = [{"type": "integer", "multipleOf": 9973 + number}, {"type": "integer", "multipleOf": 9967}]
    return json_grammar({"allOf": both})


@pytest.fixture
def with_compiler(
    tokenizer: Tokenizer, vocab_size: int
) -> Callable[[Callable[[GrammarCompiler], Awaitable[None]], GrammarLimits], None]:
    """Runs a test with a compiler, and closes it."""

    def run(
        test: Callable[[GrammarCompiler], Awaitable[None]], limits: GrammarLimits | None = None, eos: Any = (EOS,)
    ) -> None:
        async def main() -> None:
            compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, Decoding(tokenizer), vocab_size, eos), limits)
            try:
                await test(compiler)
            finally:
                await compiler.close()

        asyncio.run(main())

    return run


def allowed(constraint: GrammarConstraint, vocab_size: int) -> set[int]:
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    constraint.fill(mask)
    return {token for token in range(vocab_size) if int(mask[token // 32]) >> token % 32 & 1}


def children(compiler: GrammarCompiler) -> list[psutil.Process]:
    """The compilations that run in the checker."""
    assert compiler._checker is not None
    return psutil.Process(compiler._checker._process.pid).children()


def test_a_constraint_follows_its_grammar_and_forks_go_their_own_way(
    with_compiler: Any, tokenizer: Tokenizer, vocab_size: int
) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        prototype = await compiler.compile(Grammar(one_of(["yes", "no", "nn"]), "f"))
        first = prototype.fork()
        texts = {tokenizer.decode([token]) for token in allowed(first, vocab_size)}
        assert texts <= {"y", "ye", "yes", "n", "no", "nn"}
        assert {"y", "n"} <= texts
        y, n = (tokenizer.encode(char).ids[0] for char in "yn")
        second = first.fork()
        first.accept(y)
        second.accept(n)
        assert not first.finished
        assert {tokenizer.decode([t])[0] for t in allowed(first, vocab_size)} == {"e"}
        assert {tokenizer.decode([t])[0] for t in allowed(second, vocab_size)} == {"o", "n"}
        second.accept(n)
        assert second.finished
        third = prototype.fork()
        assert allowed(third, vocab_size) == allowed(prototype.fork(), vocab_size)
        with pytest.raises(ConstraintFailed):
            third.accept(tokenizer.encode("q").ids[0])

    with_compiler(test)


def test_special_tokens_and_padding_are_never_text(with_compiler: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        anything = (await compiler.compile(Grammar(regex("(?s:.*)"), "f"))).fork()
        tokens = allowed(anything, vocab_size)
        assert EOS in tokens
        assert tokenizer.token_to_id("<|im_start|>") not in tokens
        assert max(tokens) < tokenizer.get_vocab_size(with_added_tokens=True)
        assert len(tokens) > 250

    with_compiler(test)


def test_a_control_token_that_a_grammar_spells_is_text(
    with_compiler: Any, tokenizer: Tokenizer, vocab_size: int
) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        constraint = (await compiler.compile(Grammar(one_of(["so <|im_end|> it is"]), "f"))).fork()
        tokens: list[int] = []
        while not constraint.finished:
            tokens.append(min(allowed(constraint, vocab_size)))
            constraint.accept(tokens[-1])
        assert EOS not in tokens
        assert tokenizer.decode(tokens, skip_special_tokens=False) == "so <|im_end|> it is"

    with_compiler(test)


def test_nothing_but_an_end_allowed_means_that_the_text_is_complete(with_compiler: Any, vocab_size: int) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        empty = (await compiler.compile(Grammar("", "f", foreign='start: ""'))).fork()
        assert allowed(empty, vocab_size) == {EOS}
        assert empty.finished

    with_compiler(test)


def test_the_same_grammar_is_compiled_once_and_refusals_are_remembered(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        grammar = json_grammar({"type": "integer"})
        first, second = await asyncio.gather(compiler.compile(grammar), compiler.compile(grammar))
        third = await compiler.compile(Grammar(grammar.start, "elsewhere"))
        assert first._prototype is second._prototype is third._prototype
        for field in ("here", "there"):
            with pytest.raises(InvalidRequest) as caught:
                await compiler.compile(Grammar(json_of({"type": "strng"}), field))
            assert (caught.value.param, "Invalid type: strng" in caught.value.message) == (field, True)
        assert len(compiler._kept) == 2
        for number in range(10):
            await compiler.compile(json_grammar({"const": number}))
        assert len(compiler._kept) == 4
        assert (await compiler.compile(grammar))._prototype is not first._prototype

    with_compiler(test, GrammarLimits(kept=4))


def test_a_prototype_that_reached_its_limits_is_replaced(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        first = await compiler.compile(json_grammar({"type": "integer"}))
        with pytest.raises(ConstraintFailed):
            first.fork().accept(EOS)
        assert (await compiler.compile(json_grammar({"type": "integer"})))._prototype is not first._prototype

    with_compiler(test)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(regex("(a"), "f"), "unclosed group"),
        (Grammar(regex("(?<=a)b"), "f"), "look-around"),
        (Grammar(regex("[z-a]"), "f"), "invalid character class range"),
        (Grammar(regex("(a)\\1"), "f"), "backreferences"),
        (json_grammar({"type": "string", "pattern": "(?!a)b"}), "look-around"),
        (json_grammar({"$ref": "#/$defs/none"}), "does not exist"),
        (json_grammar({"$ref": "#"}), "nothing satisfies it"),
        (json_grammar({"not": {}}), 'not supported: "not"'),
        (json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf"),
        (json_grammar({"enum": []}), "Unsatisfiable"),
        (Grammar("", "f", foreign='start: "a'), "lexer error"),
        (Grammar("", "f", foreign="start: missing"), "missing"),
        (Grammar("", "f", foreign="root ::= ("), "line 1"),
        (Grammar("", "f", foreign="no grammar at all"), "line 1"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(with_compiler: Any, grammar: Grammar, reason: str) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await compiler.compile(grammar)
        assert reason in caught.value.message
        assert len(caught.value.message) < 500
        assert "start:" not in caught.value.message
        await compiler.compile(json_grammar({"type": "integer"}))

    with_compiler(test)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a|a)*b", "(x+x+)+y", "(.*a){20}", "a{1,100000}", "(a?){50}a{50}"],
)
@pytest.mark.case(27)
def test_patterns_that_backtracking_would_choke_on_are_followed_in_linear_time(
    with_compiler: Any, tokenizer: Tokenizer, vocab_size: int, pattern: str
) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        token = tokenizer.encode("x" if pattern.startswith("(x") else "a").ids[0]
        for grammar in (Grammar(regex(pattern), "f"), json_grammar({"type": "string", "pattern": f"^{pattern}$"})):
            constraint = (await compiler.compile(grammar)).fork()
            if '"' in {tokenizer.decode([t]) for t in allowed(constraint, vocab_size)}:
                constraint.accept(tokenizer.encode('"').ids[0])
            for _ in range(40):
                assert token in allowed(constraint, vocab_size)
                constraint.accept(token)

    async def limited(compiler: GrammarCompiler) -> None:
        await asyncio.wait_for(test(compiler), 20)

    with_compiler(limited)


def test_a_grammar_of_too_many_bytes_is_refused_before_anything_is_done(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        with pytest.raises(InvalidRequest, match="at most 1000") as caught:
            await compiler.compile(json_grammar({"enum": ["x" * 1000]}))
        assert caught.value.code == "grammar_too_complex"
        assert compiler._checker is None

    with_compiler(test, GrammarLimits(max_size_bytes=1000))


@pytest.mark.case(25)
def test_a_grammar_that_takes_too_long_or_too_much_is_refused_and_nothing_is_left_running(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        await compiler.compile(json_grammar({"type": "integer"}))
        with pytest.raises(InvalidRequest, match=r"seconds of a processor|MiB to compile") as caught:
            await compiler.compile(slow(0))
        assert caught.value.code == "grammar_too_complex"
        with pytest.raises(InvalidRequest, match=r"seconds of a processor|MiB to compile"):
            await compiler.compile(json_grammar({"allOf": [{"pattern": f"[a-z]{{{i}}}x.*"} for i in range(40)]}))
        assert children(compiler) == []
        assert compiler.compiling == 0

    with_compiler(test, GrammarLimits(cpu_seconds=1, memory_bytes=128 << 20))


@pytest.mark.case(26)
def test_a_quick_grammar_does_not_wait_behind_slow_ones_and_abandoned_ones_end(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        await compiler.compile(json_grammar({"type": "integer"}))
        tasks = [asyncio.create_task(compiler.compile(slow(number))) for number in range(8)]
        await asyncio.sleep(1)
        held = [child.status() == psutil.STATUS_STOPPED for child in children(compiler)]
        assert sum(held) >= 6
        await asyncio.wait_for(compiler.compile(json_grammar({"type": "boolean"})), 5)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert compiler.compiling == 0
        for _ in range(100):
            if not children(compiler):
                break
            await asyncio.sleep(0.02)
        assert children(compiler) == []
        await compiler.compile(json_grammar({"type": "null"}))

    with_compiler(test, GrammarLimits(cpu_seconds=20, memory_bytes=2 << 30))


def test_a_grammar_is_compiled_on_for_who_still_waits(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        grammar = json_grammar({"type": "integer"})
        leaving, staying = (asyncio.create_task(compiler.compile(grammar)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert isinstance(await staying, GrammarConstraint)

    with_compiler(test)


def test_too_many_at_once_are_told_to_come_back(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        tasks = [asyncio.create_task(compiler.compile(json_grammar({"const": number}))) for number in range(6)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == 2
        assert sum(isinstance(outcome, GrammarConstraint) for outcome in outcomes) == 4

    with_compiler(test, GrammarLimits(max_waiting=4))


def test_the_checker_is_started_again_when_it_has_died(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        await compiler.compile(json_grammar({"type": "integer"}))
        assert compiler._checker is not None
        before = compiler._checker._process
        before.kill()
        await before.wait()
        await compiler.compile(json_grammar({"type": "boolean"}))
        assert compiler._checker._process.pid != before.pid

    with_compiler(test)


def test_the_checker_ends_with_its_owner(with_compiler: Any) -> None:
    pids = []

    async def test(compiler: GrammarCompiler) -> None:
        await compiler.compile(json_grammar({"type": "integer"}))
        assert compiler._checker is not None
        pids.append(compiler._checker._process.pid)

    with_compiler(test)
    assert not psutil.pid_exists(pids[0])


def test_a_model_without_an_end_token_is_told_so(with_compiler: Any) -> None:
    async def test(compiler: GrammarCompiler) -> None:
        with pytest.raises(UnsupportedField, match="ends a text"):
            await compiler.compile(json_grammar({"type": "integer"}))

    with_compiler(test, eos=())


def test_reasons_do_not_quote_the_grammar() -> None:
    quoting = 'at 1(8): failed to compile JSON schema: Bad thing\n   1 | start: %json {"secret": 1}\n             ^'
    assert reason_of(quoting) == "Bad thing"
    assert reason_of("NoExtensionBias\n<state>\nTokens: x") == "nothing satisfies it"
    assert reason_of("Too many items\n<state>\nTokens: x") == "Too many items"
