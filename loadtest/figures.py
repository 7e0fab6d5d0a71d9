"""What came back for each request, and what a run of them comes to.

Pure data and arithmetic, of the standard library only: peers' virtual environments import it too.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Answer:
    """What came back for one request. Times are seconds of `time.perf_counter`."""

    started: float  # when it was sent; when it was due, where requests come at times of their own
    status: int = 0
    stamps: list[float] = field(default_factory=list)  # arrival of each piece of text
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the server's prefix cache; 0 where it does not say
    error: str | None = None
    left: bool = False  # the client went away in the middle, as it was told to
    ended: float = 0.0
    key: int = 0  # which of the API keys it came with

    @property
    def good(self) -> bool:
        """Answered to the end."""
        return self.error is None and not self.left

    @property
    def tokens(self) -> int:
        """Of output; pieces of text where the server does not count."""
        return self.completion_tokens or len(self.stamps)

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.stamps[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two pieces of text."""
        if len(self.stamps) < 2:
            return None
        return (self.stamps[-1] - self.stamps[0]) / (max(2, self.tokens) - 1)

    @property
    def seconds(self) -> float:
        """To the end of the answer."""
        return (self.ended or self.stamps[-1]) - self.started


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request may take, in milliseconds; None where anything will do."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=500,tpot=50`; ArgumentTypeError otherwise."""
        try:
            bounds = {name: float(bound) for name, bound in (part.split("=") for part in text.split(","))}
        except ValueError:
            bounds = {}
        if not bounds or set(bounds) - set(cls.__slots__) or not all(0 < bound < math.inf for bound in bounds.values()):
            raise argparse.ArgumentTypeError(f"must be milliseconds like ttft=500,tpot=50,e2e=10000, not {text!r}")
        return cls(**bounds)

    def kept(self, answer: Answer) -> bool:
        """Whether a request was answered, and in time."""
        if not answer.good or not answer.stamps:
            return False
        times = {"ttft": answer.ttft, "tpot": answer.tpot, "e2e": answer.seconds}
        bounds = {name: bound for name in times if (bound := getattr(self, name)) is not None}
        return all((times[name] or 0.0) * 1e3 <= bound for name, bound in bounds.items())


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to. Times in milliseconds; None where nothing could be timed."""

    kind: str
    requests: int
    concurrency: int  # at most; 0: without bound
    failed: int
    wall_seconds: float
    prompt_tokens: int
    completion_tokens: int
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    cached_tokens: int = 0  # of the prompts, where the server says so
    itl_p50: float | None = None  # between one piece of text and the next
    itl_p99: float | None = None
    e2e_p50: float | None = None
    e2e_p99: float | None = None
    left: int = 0
    rate: float | None = None  # requests a second that were offered; None: the next when one is answered
    requests_per_second: float = 0.0
    within_slo: float | None = None  # share of the requests that were to be answered
    goodput: float | None = None  # requests a second within the SLO
    fairness: float | None = None  # `jain` of tokens a second
    client_cpu: float | None = None  # share of one core that measuring took

    @property
    def tpot_spread(self) -> float | None:
        """TPOT p99 as a multiple of p50."""
        return self.tpot_p99 / self.tpot_p50 if self.tpot_p50 and self.tpot_p99 is not None else None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Figures:
        """From a row of a file, which may say more."""
        return cls(**{one.name: row[one.name] for one in fields(cls) if one.name in row})


def summarise(
    kind: str,
    concurrency: int,
    answers: Sequence[Answer],
    wall_seconds: float,
    *,
    slo: Slo | None = None,
    rate: float | None = None,
    client_cpu: float | None = None,
) -> Figures:
    """The figures of a run. What failed or was left counts nowhere but in `failed` and `left`."""
    good = [answer for answer in answers if answer.good]
    timed = [answer for answer in good if answer.stamps]
    wanted = len(answers) - sum(answer.left for answer in answers)
    times = {
        "ttft": [answer.ttft for answer in timed],
        "tpot": [tpot for answer in timed if (tpot := answer.tpot) is not None],
        "itl": [after - before for answer in timed for before, after in itertools.pairwise(answer.stamps)],
        "e2e": [answer.seconds for answer in timed],
    }
    quantiles = {f"{name}_p{share}": quantile_ms(of, share / 100) for name, of in times.items() for share in (50, 99)}
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    completion_tokens = sum(answer.tokens for answer in good)
    kept = None if slo is None else sum(map(slo.kept, answers))
    return Figures(
        kind=kind,
        requests=len(answers),
        concurrency=concurrency,
        failed=sum(answer.error is not None for answer in answers),
        wall_seconds=wall_seconds,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        output_tokens_per_second=completion_tokens / wall_seconds,
        prompt_tokens_per_second=prompt_tokens / wall_seconds,
        cached_tokens=sum(answer.cached_tokens for answer in good),
        left=len(answers) - wanted,
        rate=rate,
        requests_per_second=len(good) / wall_seconds,
        within_slo=None if kept is None or not wanted else kept / wanted,
        goodput=None if kept is None else kept / wall_seconds,
        fairness=_fairness(timed),
        client_cpu=client_cpu,
        **quantiles,
    )


def _fairness(timed: Sequence[Answer]) -> float | None:
    """Between API keys, where there are several; else between requests."""
    keys = {answer.key for answer in timed}
    if len(keys) > 1:
        return jain([sum(answer.tokens for answer in timed if answer.key == key) for key in keys])
    return jain([answer.tokens / answer.seconds for answer in timed if answer.seconds > 0])


def jain(shares: Sequence[float]) -> float | None:
    """1 when all got the same, 1/n when one got everything (Jain, Chiu and Hawe: A Quantitative Measure of Fairness,
    1984); None of nothing."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


def quantile_ms(seconds: Sequence[float], share: float) -> float | None:
    """The value that `share` of `seconds` are below, in milliseconds; None of nothing."""
    if not seconds:
        return None
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e3


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """What a report and a comparison need of each request: milliseconds, tokens, errors; and tokens by the second."""
    began = min((answer.started for answer in answers), default=0.0)
    stamps = sorted(stamp - began for answer in answers for stamp in answer.stamps)
    by_second = [0] * (math.ceil(stamps[-1] + 1e-9) if stamps else 0)
    for stamp in stamps:
        by_second[int(stamp)] += 1
    rows = [(answer, answer.good and bool(answer.stamps)) for answer in answers]
    return {
        "at": [round(answer.started - began, 3) for answer in answers],
        "ttft": [_ms(answer.ttft) if timed else None for answer, timed in rows],
        "tpot": [_ms(answer.tpot) if timed else None for answer, timed in rows],
        "e2e": [_ms(answer.seconds) if timed else None for answer, timed in rows],
        "tokens": [answer.tokens for answer in answers],
        "errors": dict(Counter(answer.error for answer in answers if answer.error).most_common(20)),
        "pieces_by_second": by_second,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
