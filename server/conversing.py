"""From a validated conversation to work in the engine: the one way that every route which chats goes.

Here is decided what the answer must look like and how it is read: its grammar and its parser. A forced call is all that
its answer may hold. Where the model may call, but has a format to answer in, it may do either. Thoughts come before
both and are free.

Runs in the task that answers the request. Knows what a chat request says, and nothing of how its answer looks on the
wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Receive

from scheduler.request import Request as EngineRequest
from server.choice import Echo
from server.errors import unsupported, wrong
from server.generation import Generation
from server.intake import LengthPolicy, engine_request, sampling_params
from server.message import CLOSING, OPENING, MessageParser, ReasoningSplitter, Start, start_of
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import check_chat
from server.protocol.structured import grammar_of
from server.protocol.tools import tool_choice
from server.routes.generating import bad_words, check_room, compiled, generation, text_options
from server.state import ServerState
from server.structured.grammar import Grammar, literal
from server.tokenize import Tokenizing
from server.tools.formats import CALLS, CallFormat, Mark, ToolChoice

_ANYTHING = "(?s:.*)"
_CLOSED = "(?s:.*<\\/think>.*)"
_BUDGET = "thinking_token_budget"


async def prompt_of(state: ServerState, fields: ChatCompletionRequest) -> list[int]:
    """The ids of the conversation. Raises InvalidRequest for fields that cannot be, and what the template refuses."""
    check_chat(fields, state.limits)
    shown = [] if _choice(fields) is None else [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    return await state.tokenizing.run(_tokenised, state.tokenizing, fields, shown)


async def request_of(
    state: ServerState, fields: ChatCompletionRequest, prompt: list[int], request_id: str, arrival: float
) -> EngineRequest:
    """What the engine is asked for. Raises an APIError when prompt or answer do not fit."""
    params = sampling_params(
        fields,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        bad_words=await bad_words(state, fields),
    )
    limit = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    return engine_request(
        request_id,
        prompt,
        params,
        fields,
        choices=fields.n or 1,
        length=LengthPolicy(getattr(fields, limit), None, limit, "messages"),
        max_model_len=state.limits.max_model_len,
        arrival=arrival,
    )


async def begin(
    state: ServerState, fields: ChatCompletionRequest, request_id: str, arrival: float, receive: Receive
) -> Generation:
    """Hand the conversation to the engine. Raises an APIError when it is refused, and ClientGone."""
    check_room(state, fields, fields.n or 1)
    work = await request_of(state, fields, await prompt_of(state, fields), request_id, arrival)
    prompt: list[int] = work.prompt.tolist()
    choice = _choice(fields)
    calls = None if choice is None else state.call_format
    marks = (*(calls.marks if calls else ()), *((OPENING, CLOSING) if state.splits_reasoning else ()))
    special = state.tokenizing.decoding.ids_of(marks)  # those that are tokens of their own
    start = _start(state, prompt) if state.splits_reasoning else None
    grammar = _grammar(fields, choice, calls, special, start)
    options = replace(
        text_options(fields, logprobs=bool(fields.logprobs)),
        parser=_parser(fields, choice, calls, start),
        shown=frozenset(special.values()),
    )
    work = replace(work, constraint=await compiled(state, grammar, receive))
    echoes = [] if fields.prompt_logprobs is None else [Echo(None, prompt, scored=True)]
    return generation(state, [work], options, echoes)


def _choice(fields: ChatCompletionRequest) -> ToolChoice | None:
    return tool_choice(fields.tools, fields.tool_choice, fields.parallel_tool_calls)


def _tokenised(tokenizing: Tokenizing, fields: ChatCompletionRequest, tools: list[dict[str, Any]]) -> list[int]:
    """Runs in a worker thread. A model that may not call is not told of the tools."""
    variables: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", fields.reasoning_effort)
    continues = bool(fields.continue_final_message)
    return tokenizing.encode_chat(
        [message.for_template() for message in fields.messages],
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        tools=tools,
        documents=fields.documents,
        variables=variables,
        add_special_tokens=bool(fields.add_special_tokens),
        truncates=fields.truncate_prompt_tokens is not None,
    )


def _start(state: ServerState, prompt: Sequence[int]) -> Start:
    """Whether the prompt leaves a thought open, by what stands behind its last control token."""
    decoding = state.tokenizing.decoding
    control = decoding.special_ids - set(decoding.ids_of((OPENING, CLOSING)).values())
    last = next((place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in control), -1)
    return start_of(decoding.text_of(prompt[last + 1 :], skip_special=False))


def _parser(
    fields: ChatCompletionRequest, choice: ToolChoice | None, calls: CallFormat | None, start: Start | None
) -> Callable[[], MessageParser] | None:
    """What makes a parser for each choice; None for an answer that is text and nothing else."""
    if start is None and choice is None:
        return None
    return lambda: MessageParser(
        None if start is None else ReasoningSplitter(start),
        None if choice is None or calls is None else calls.parser(choice.names, calls.new_id),
        show_reasoning=fields.include_reasoning is not False,
        named=choice is not None and choice.mode == "named",
    )


def _grammar(
    fields: ChatCompletionRequest,
    choice: ToolChoice | None,
    calls: CallFormat | None,
    special: Mapping[str, int],
    start: Start | None,
) -> Grammar | None:
    """Raises InvalidRequest for formats that cannot be, and for a choice that excludes one."""

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else literal(text)

    grammar = grammar_of(fields.response_format, fields.structured_outputs)
    if choice is not None and calls is not None and (grammar is not None or choice.forced):
        rules = calls.rules(choice.tools, choice.parallel, mark)
        if choice.forced and fields.structured_outputs is not None:
            raise wrong("structured_outputs", "and a 'tool_choice' that forces a call exclude each other")
        if choice.forced or grammar is None:
            grammar = Grammar(CALLS, "tools", rules)
        else:
            grammar = grammar.within(f"answer | {CALLS}", "answer", rules)
    if start is None or start == "outside":
        return grammar
    budget = None if fields.thinking_token_budget == -1 else fields.thinking_token_budget
    return _behind_thoughts(grammar, start, special, mark, budget)


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
