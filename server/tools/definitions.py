"""The functions a client offers, and which of them the model may or has to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `definition` is what templates are shown; `parameters` the schema that calls are kept to."""

    name: str
    definition: Mapping[str, Any]
    parameters: Mapping[str, Any]  # prepared: see `server.structured.schema`
    field: str  # where the client defined it


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What to do with the tools. `mode` "named" is "required" with one tool, but for how the answer says it ended."""

    tools: Sequence[Tool]  # those that may be called
    mode: Literal["auto", "required", "named"]
    parallel: bool  # whether several calls may be made

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def forced(self) -> bool:
        return self.mode != "auto"
