"""From a validated conversation to work in the engine: the one way that every route which chats goes.

Runs in the task that answers the request. Knows what a chat request says, and nothing of how its answer looks on the
wire.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.types import Receive

from scheduler.request import Request as EngineRequest
from server.choice import Echo
from server.generation import Generation
from server.intake import LengthPolicy, engine_request, sampling_params
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import check_chat
from server.protocol.tools import tool_choice
from server.routes.generating import bad_words, compiled, generation, text_options
from server.shaping import form_of
from server.state import ServerState
from server.tokenize import Tokenizing
from server.tools.definitions import ToolChoice


async def prompt_of(state: ServerState, fields: ChatCompletionRequest) -> list[int]:
    """The ids of the conversation. Raises InvalidRequest for fields that cannot be, and what the template refuses."""
    check_chat(fields, state.limits)
    shown = [] if _choice(fields) is None else [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    return await state.tokenizing.run(_tokenised, state.tokenizing, fields, shown)


async def request_of(
    state: ServerState, fields: ChatCompletionRequest, prompt: list[int], request_id: str, arrival: float
) -> EngineRequest:
    """What the engine is asked for. Raises an APIError when prompt or answer do not fit."""
    return engine_request(
        request_id,
        prompt,
        sampling_params(
            fields,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
            bad_words=await bad_words(state, fields),
        ),
        fields,
        choices=fields.n or 1,
        length=_length(fields),
        max_model_len=state.limits.max_model_len,
        arrival=arrival,
    )


async def begin(
    state: ServerState, fields: ChatCompletionRequest, request_id: str, arrival: float, receive: Receive
) -> Generation:
    """Hand the conversation to the engine. Raises an APIError when it is refused, and ClientGone."""
    work = await request_of(state, fields, await prompt_of(state, fields), request_id, arrival)
    form = form_of(state, fields, _choice(fields), work.prompt.tolist())
    work = replace(work, constraint=await compiled(state, form.grammar, receive))
    echoes = [] if fields.prompt_logprobs is None else [Echo(None, work.prompt.tolist(), scored=True)]
    options = text_options(fields, logprobs=bool(fields.logprobs))
    return generation(state, [work], replace(options, parser=form.parser, shown=form.shown), echoes)


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


def _length(fields: ChatCompletionRequest) -> LengthPolicy:
    if fields.max_completion_tokens is not None:
        return LengthPolicy(fields.max_completion_tokens, None, "max_completion_tokens", "messages")
    return LengthPolicy(fields.max_tokens, None, "max_tokens", "messages")
