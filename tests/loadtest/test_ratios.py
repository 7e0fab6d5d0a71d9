"""The comparison's arithmetic and tables, on figures small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.figures import Figures
from loadtest.ratios import (
    Measured,
    bytes_per_second,
    ceiling_rows,
    figure_rows,
    medians,
    operations_per_second,
    ratio_rows,
    slower,
)
from loadtest.tables import markdown

CHAT = Figures("chat", 4, 2, 0, 10.0, 1000, 400, 40.0, 100.0, 50.0, 90.0, 20.0, 30.0)
PREFILL = Figures("prefill", 4, 2, 0, 10.0, 8000, 4, 0.4, 800.0, 700.0, 900.0, None, None)


def server(title: str, *sets: Figures, weights: str = "stored", of_peer: bool = True) -> Measured:
    return Measured(title, weights, of_peer, 1.5, {figures.kind: figures for figures in sets})


OURS = server("Octavo", CHAT, PREFILL, of_peer=False)


def test_each_number_is_the_median_of_its_own() -> None:
    runs = [
        replace(CHAT, output_tokens_per_second=rate, tpot_p50=tpot) for rate, tpot in ((1, 9.0), (9, 1.0), (4, 2.0))
    ]
    middle = medians([*runs, PREFILL])
    assert (middle["chat"].output_tokens_per_second, middle["chat"].tpot_p50) == (4, 2.0)
    assert middle["prefill"] == PREFILL


def test_a_failure_under_one_seed_is_a_failure() -> None:
    assert medians([CHAT, replace(CHAT, failed=2), CHAT])["chat"].failed == 2


def test_ratios_are_of_output_tokens_and_for_prefill_of_prompt_tokens() -> None:
    peer = server(
        "Peer", replace(CHAT, output_tokens_per_second=16.0), replace(PREFILL, prompt_tokens_per_second=500.0)
    )
    assert ratio_rows([OURS, peer]) == [
        ("octavo against", "chat", "prefill"),
        ("Peer, stored", "2.50x", "1.60x"),
    ]


def test_a_peer_is_compared_in_its_own_weights_and_only_where_it_answered() -> None:
    narrow = server("Octavo", replace(CHAT, output_tokens_per_second=30.0), weights="bfloat16", of_peer=False)
    peers = [
        server("Narrow", replace(CHAT, output_tokens_per_second=10.0), weights="bfloat16"),
        server("Broken", replace(CHAT, failed=1)),
        server("Alone", CHAT, weights="other"),
    ]
    assert ratio_rows([OURS, narrow, *peers])[1:] == [("Narrow, bfloat16", "3.00x", "-"), ("Broken, stored", "-", "-")]


def test_figures_stand_beside_their_times() -> None:
    rows = figure_rows([OURS, server("Broken", replace(CHAT, failed=3))])
    assert rows[1] == ("Octavo, stored", "40.0 (50.0 / 20.0)", "800 (700 / -)", "1.5 s")
    assert rows[2] == ("Broken, stored", "3 failed", "-", "1.5 s")


def test_what_was_achieved_is_weights_read_and_products_computed() -> None:
    cost = {"layer_weights": 1000, "head_weights": 100, "weight_bytes": 4000}
    assert bytes_per_second(CHAT, cost) == pytest.approx(4000 / 0.020)
    # 1000 prompt tokens and all 400 outputs but each request's last pass the layers; 400 pass the head.
    assert operations_per_second(CHAT, cost) == pytest.approx(2 * (1396 * 1000 + 400 * 100) / 10)
    assert operations_per_second(replace(CHAT, cached_tokens=600), cost) == pytest.approx(2 * (796_000 + 40_000) / 10)
    assert bytes_per_second(PREFILL, cost) is None


def test_ceilings_are_those_of_the_weights_arithmetic() -> None:
    cost = {"layer_weights": 10**7, "head_weights": 0, "weight_bytes": 10**8}
    ceilings = {"bytes_read": 20e9, "int8_operations": 100e9, "bfloat16_operations": 10e9}
    narrow = server("Octavo", CHAT, weights="bfloat16", of_peer=False)
    probe = {"ceilings": ceilings, "costs": {"stored": cost, "bfloat16": cost}}
    rows = ceiling_rows([OURS, narrow, server("Peer", CHAT)], probe)
    assert [row[0] for row in rows[1:]] == ["chat, stored", "prefill, stored", "chat, bfloat16"]
    assert rows[1][1:] == ("5.0", "25% of 20.0", "2.8", "3% of 100")
    assert rows[2][1:3] == ("-", "-")
    assert rows[3][4] == "28% of 10.0"


def test_a_peer_that_answers_sooner_is_named() -> None:
    quick = server("Quick", replace(CHAT, ttft_p50=40.0, tpot_p50=25.0))
    assert slower([OURS, server("Slow", replace(CHAT, ttft_p50=60.0)), quick]) == [
        "chat, stored: TTFT p50 is 50.0 ms, Quick's 40.0 ms"
    ]
    assert slower([OURS, replace(quick, weights="bfloat16")]) == []
    assert slower([OURS, server("Failed", replace(CHAT, failed=1, ttft_p50=1.0))]) == []


def test_the_spread_of_time_per_token_is_p99_over_p50() -> None:
    assert CHAT.tpot_spread == 1.5
    assert PREFILL.tpot_spread is None


def test_markdown_has_a_heading_a_rule_and_the_rows() -> None:
    assert markdown([("set", "a"), ("x", "1"), ("y", "2")]).splitlines() == [
        "| set | a |",
        "| --- | ---: |",
        "| x | 1 |",
        "| y | 2 |",
    ]
