"""What the answer to a chat request must look like and how it is read: the grammar of it, and the parser for it.

A forced call is all that its answer may hold. Where the model may call, but has a format to answer in, it may do
either. Thoughts come before both and are free. Pure functions, apart from what they ask the model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from server.errors import unsupported, wrong
from server.message import MessageParser
from server.protocol.chat import ChatCompletionRequest
from server.protocol.structured import grammar_of
from server.reasoning import CLOSING, OPENING, ReasoningSplitter, Start, start_of
from server.state import ServerState
from server.structured.grammar import Grammar, literal
from server.tools.definitions import ToolChoice
from server.tools.formats import CALLS, CallFormat, Mark

_ANYTHING = "(?s:.*)"
_CLOSED = "(?s:.*<\\/think>.*)"
_BUDGET = "thinking_token_budget"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`parser` is None for an answer that is text and nothing else; `shown` are special tokens that it has to see."""

    grammar: Grammar | None
    parser: Callable[[], MessageParser] | None
    shown: frozenset[int]


def form_of(
    state: ServerState, fields: ChatCompletionRequest, choice: ToolChoice | None, prompt: Sequence[int]
) -> AnswerForm:
    """Raises InvalidRequest for formats that cannot be, and for a choice that excludes one."""
    calls = None if choice is None else state.call_format
    marks = (*(calls.marks if calls else ()), *((OPENING, CLOSING) if state.splits_reasoning else ()))
    special = state.tokenizing.decoding.ids_of(marks)  # those that are tokens of their own
    start = _start(state, prompt) if state.splits_reasoning else None

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else literal(text)

    grammar = _grammar(fields, choice, calls, mark)
    if start is not None and start != "outside":
        budget = None if fields.thinking_token_budget == -1 else fields.thinking_token_budget
        grammar = _behind_thoughts(grammar, start, special, mark, budget)
    parser = None
    if start is not None or choice is not None:
        parser = partial(_parser, start, choice, calls, fields.include_reasoning is not False)
    return AnswerForm(grammar, parser, frozenset(special.values()))


def _parser(
    start: Start | None, choice: ToolChoice | None, calls: CallFormat | None, show_reasoning: bool
) -> MessageParser:
    return MessageParser(
        None if start is None else ReasoningSplitter(start),
        None if choice is None or calls is None else calls.parser(choice.names, calls.new_id),
        show_reasoning=show_reasoning,
        named=choice is not None and choice.mode == "named",
    )


def _start(state: ServerState, prompt: Sequence[int]) -> Start:
    """Whether the prompt leaves a thought open, by what stands behind its last control token."""
    decoding = state.tokenizing.decoding
    control = decoding.special_ids - set(decoding.ids_of((OPENING, CLOSING)).values())
    last = next((place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in control), -1)
    return start_of(decoding.text_of(prompt[last + 1 :], skip_special=False))


def _grammar(
    fields: ChatCompletionRequest, choice: ToolChoice | None, calls: CallFormat | None, mark: Mark
) -> Grammar | None:
    answer = grammar_of(fields.response_format, fields.structured_outputs)
    if choice is None or calls is None or (answer is None and not choice.forced):
        return answer
    rules = calls.rules(choice.tools, choice.parallel, mark)
    if not choice.forced:
        return None if answer is None else answer.within(f"answer | {CALLS}", "answer", rules)
    if fields.structured_outputs is not None:
        raise wrong("structured_outputs", "and a 'tool_choice' that forces a call exclude each other")
    return Grammar(CALLS, "tools", rules)


def _behind_thoughts(
    reply: Grammar | None, start: Start, special: Mapping[str, int], mark: Mark, budget: int | None
) -> Grammar | None:
    """The answer with the thoughts before it, which end after `budget` tokens."""
    if budget is not None and not {OPENING, CLOSING} <= special.keys():
        raise unsupported(_BUDGET, f"is not supported: this model writes its '{CLOSING}' in pieces")
    if reply is None and budget is None:
        return None
    if reply is None:
        first = "<[*]>" if start == "inside" else f"<[^{special[OPENING]}]>"
        reply = Grammar(f"({first} <[*]>*)?", _BUDGET)
    if CLOSING in special:  # which free text cannot run into
        limit = "" if budget is None else f"[max_tokens={budget}]"
        thoughts = f"thoughts: thought {mark(CLOSING)}\nthought{limit}: /{_ANYTHING}/ & ~/{_CLOSED}/"
    else:
        thoughts = f"thoughts[suffix={literal(CLOSING)}]: /{_ANYTHING}/"
    before = "thoughts BLANKS" if start == "inside" else f"({mark(OPENING)} thoughts BLANKS)?"
    return reply.within(f"{before} reply", "reply", f"{thoughts}\nBLANKS: /[ \\n]{{0,4}}/")
