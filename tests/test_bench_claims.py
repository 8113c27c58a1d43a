"""What `make bench` counts, fits, holds against its promises, and shows."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, LlamaConfig

from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine.packing import pack
from guerdon.settings.config import ModelConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ENVIRONMENTS = BENCHMARKS.parent / ".bench"
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=99, num_labels=1, pad_token_id=0, attn_implementation="eager")
    return AutoModelForSequenceClassification.from_config(config).eval()


def test_products_and_attention_are_counted_as_pytorch_counts_them(model: Any) -> None:
    import rates

    tokens = 21
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.model(input_ids=torch.randint(3, 99, (1, tokens)))
    told = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    with torch.no_grad(), rates.Products() as products:
        model.model(input_ids=torch.randint(3, 99, (1, tokens)))
    assert rates.flops_of(products.found) == told.pop("aten.mm") + told.pop("aten.addmm", 0)
    # Its attention is computed for masked pairs, too.
    assert rates.attention_flops(3 * tokens * tokens, model.config) == sum(told.values())


def test_what_the_engine_computes_is_counted_where_it_computes_it(model: Any, tmp_path: Path) -> None:
    import rates

    model.save_pretrained(tmp_path)
    engine = build_scorer(ModelConfig(model=str(tmp_path)))
    luck = np.random.default_rng(0)
    prompt = luck.integers(3, 99, 40)
    rows = [np.concatenate([prompt, luck.integers(3, 99, 10 + i)]) for i in range(4)]
    with rates.Products() as products:
        engine.score([Sequence(row) for row in rows])
    tokens = 40 + 10 + 11 + 12 + 13
    queries, keys, feed_forward = 32 * 32 * 2, 32 * 16 * 2, 3 * 32 * 48
    of_last = tokens * keys + len(rows) * (queries + feed_forward)
    needed = 2 * (tokens * 2 * (queries + keys + feed_forward) + of_last)
    head = 2 * len(rows) * 32
    assert needed <= rates.flops_of(products.found) <= needed + head


def test_pairs_are_those_that_a_causal_tree_shows() -> None:
    import rates

    luck = np.random.default_rng(0)
    prompt = luck.integers(3, 99, 50)
    rows = [np.concatenate([prompt, luck.integers(3, 99, 7)]) for _ in range(5)]
    tree, alone = ([*pack(rows, budget=9_999, share=share)] for share in (True, False))
    assert rates.pairs_of(alone) == 5 * 57 * 58 // 2
    assert rates.pairs_of(tree) == 50 * 51 // 2 + 5 * (7 * 50 + 7 * 8 // 2)


def test_the_share_is_of_the_same_rounds_products() -> None:
    import rates

    row = {"product_flops": 80.0, "attention_flops": 20.0, "seconds": [2.0, 4.0], "product_seconds": [1.0, 1.0]}
    assert rates.shares_of(row) == [50 / 80, 25 / 80]


def test_the_fit_finds_its_factors_and_none_below_nothing() -> None:
    import growth

    terms = np.array([[1.0, 10.0], [2.0, 11.0], [5.0, 13.0], [9.0, 40.0]])
    assert growth.fit(terms, terms @ [3.0, 0.5]) == pytest.approx([3.0, 0.5])
    assert growth.fit(terms, terms @ [3.0, -0.05])[1] == 0
    assert growth.nearest(np.array([1.0, 2.0, 4.0]), np.array([0.9, 2.2, 4.0])) == pytest.approx(1.0)


def _grown(seconds_of: Any) -> dict:
    import growth

    def row(n: int) -> dict:
        pairs = growth.PROMPT**2 // 2 + n * (growth.RESPONSE * growth.PROMPT + growth.RESPONSE**2 // 2)
        return {"responses": n, "groups": 2, "computed": 2 * n, "pairs": 2 * pairs, "seconds": [2 * seconds_of(n)]}

    return {
        "date": "2026-11-22", "commit": "c0ffee", "hardware": "a machine", "rows": [row(n) for n in growth.RESPONSES]
    }  # fmt: skip


def test_a_cost_of_the_tokens_computed_is_told_from_one_of_the_tokens_sent() -> None:
    import growth

    computed = _grown(lambda n: 1e-4 * (growth.PROMPT + n * growth.RESPONSE))
    assert growth.deviations(computed)["tokens"] == pytest.approx([0] * 6)
    sent = _grown(lambda n: 1e-4 * n * (growth.PROMPT + growth.RESPONSE))
    assert max(map(abs, growth.deviations(sent)["tokens"])) > 0.3


def _form(rate: float, pads: bool, ours: bool = False) -> dict:
    return {"pads": pads, "ours": ours, "seq_s": [rate, rate * 1.1, rate * 0.9], "seconds": [1.0], "p50_ms": [9.0],
            "p99_ms": [12.0], "max_diff": 1e-7}  # fmt: skip


def _results(ours: float) -> dict:
    def cell(load: str, responses: int) -> dict:
        from in_process import ENGINE, ONE_BY_ONE, SORTED

        forms = {
            "guerdon, one request per prompt": _form(ours, False, True), ENGINE.name: _form(99.0, False, True),
            "PyTriton, one request per prompt, padded to its longest": _form(5.0, True),
            "PyTriton, one request per sequence": _form(10.0, False), SORTED.name: _form(6.0, True),
            ONE_BY_ONE.name: _form(9.0, False),
        }  # fmt: skip
        return {"load": load, "responses": responses, "prompts": 6, "sequences": 48, "tokens": 9_000,
                "prompt_tokens": 180, "median_tokens": 190, "forms": forms}  # fmt: skip

    about = {"date": "2026-11-22", "commit": "c0ffee", "hardware": "a machine"}
    models = [{
        "shape": "384 x 6", "dtype": "float32", "responses": 8, "computed": 9,
        "product_flops": 8e9, "attention_flops": 1e9, "product_bytes": 1e6,
        "seconds": [1.0, 1.1], "product_seconds": [0.9, 0.9],
    }]  # fmt: skip
    return {
        "peers": {**about, "data": "chats", "shape": "small", "rounds": 3, "response_tokens": 192,
                  "missing": {"Ray Serve, one request per prompt": "no environment"},
                  "cells": [cell(load, n) for load in ("short", "long") for n in (1, 8)]},
        "null": {**about, "forms": {"guerdon, one request per sequence": {
            **{f"rps_{c}": [9.0] for c in (1, 8, 64)}, "p50_ms_1": [1.0]}}},
        "rates": {**about, "device": "cpu", "threads": 2, "copy_bytes_s": [1e10], "models": models},
        "growth": _grown(lambda n: 1e-4 * (256 + n * 128)),
    }  # fmt: skip


def test_promises_are_of_guerdons_server_against_the_best_of_each_kind() -> None:
    import claims

    found = {claim.text: claim for claim in claims.claims_of(_results(ours=36.0))}
    told = {text: (round(claim.found, 3), claim.holds) for text, claim in found.items()}
    padded, fastest = "in process: transformers, sorted by length and padded", "PyTriton, one request per sequence"
    assert told[f"short prompts, 8 responses, of the best padded peer ({padded})"] == (6.0, True)
    assert told[f"short prompts, 8 responses, of the fastest form of any other peer ({fastest})"] == (3.6, True)
    assert told[f"long prompts, 8 responses, of the best padded peer ({padded})"] == (6.0, True)
    assert told[f"long prompts, 1 response, of the fastest form of any other peer ({fastest})"] == (3.6, True)
    assert len(found) == 8 and claims.verdict(list(found.values())).endswith("All 8 promises held.")


def test_a_broken_promise_is_told() -> None:
    import claims

    told = claims.claims_of(_results(ours=14.0))
    assert [c.holds for c in told if c.text.startswith("short prompts, 8")] == [False, False]
    assert claims.verdict(told).count("NOT held") == 5  # both of both loads, and the sum
    assert not claims.are_kept(told)
    assert "held" not in claims.verdict(claims.claims_of({}))


def test_a_goal_that_is_not_reached_is_told_and_breaks_no_promise() -> None:
    import bench_report
    import claims

    results = _results(ours=36.0)
    for cell in results["peers"]["cells"]:
        cell["forms"]["vLLM, one request per prompt"] = _form(30.0, False)
    told = claims.claims_of(results)
    goals = [claim for claim in told if claim.is_goal]
    # Short prompts with 1 and 8 responses, then long ones.
    assert [(claim.found, claim.bound, claim.holds) for claim in goals] == [
        (1.2, 1.3, False), (1.2, 1.6, False), (1.2, 1.0, True), (1.2, 1.8, False)
    ]  # fmt: skip
    assert claims.are_kept(told) and claims.verdict(told).endswith("All 8 promises held. 1 of 4 goals reached.")
    results["peers"]["busy"] = True
    assert [claim.bound for claim in claims.claims_of(results) if claim.is_goal] == [1.0] * 4
    results["peers"]["busy"] = False
    line = "short prompts, 8 responses, of vLLM (vLLM, one request per prompt): 1.20 times, the goal is at least 1.6"
    assert f"- {line}: not reached" in claims.verdict(told)
    assert "| than vLLM's fastest form | 1.20 | 1.20 |" in bench_report.report(results)


def test_a_form_far_behind_the_best_of_its_kind_is_not_measured_again() -> None:
    import contest

    def entrant(name: str, pads: bool, by_prompt: bool = False) -> Any:
        return contest.Entrant(name, pads, False, lambda _: (0.0, {}, []), by_prompt)

    found = {"a": _form(10.0, False), "b": _form(6.0, False), "p": _form(5.0, True), "q": _form(3.0, True)}
    found["ours"] = _form(40.0, False, True)
    stays = [name for name in ("a", "b", "p", "q") if contest.takes_part(entrant(name, found[name]["pads"]), 8, found)]
    assert stays == ["a", "p"]
    assert contest.takes_part(entrant("new", True), 8, found)
    assert not contest.takes_part(entrant("new", True, by_prompt=True), 1, {})


@pytest.mark.slow
def test_what_was_found_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import bench_plots
    import bench_report

    results = _results(ours=36.0)
    text = bench_report.report(results)
    assert "| than the best padded peer | 6.00 | 6.00 |" in text
    assert "| guerdon, one request per prompt | **36.00** | **36.00** |" in text
    assert "Ray Serve, one request per prompt (no environment)" in text
    bench_plots.draw(results, tmp_path)
    assert {p.name for p in tmp_path.glob("*.png")} == {"bench.png", "bench_growth.png", "bench_limit.png"}


def _one_round(names: list[str], environments: Path, folder: Path) -> dict:
    """Returns what the contest found with the demo's prompts."""
    from transformers import PreTrainedTokenizerFast

    import contest
    from workload import DEMO_PROMPTS, make_cell, make_models, read_chats

    chats = read_chats(DEMO_PROMPTS)[:8]
    model = make_models(folder, [[c["prompt"] + r for c in chats for r in c["responses"]]])
    cell = make_cell(chats, PreTrainedTokenizerFast.from_pretrained(model), "short", 4)
    return contest.measure([cell], names, environments, folder, rounds=1, end=time.monotonic() + 60, busy=False)


def _check_forms(forms: dict, names: list[str]) -> None:
    from in_process import ONE_BY_ONE

    assert forms.keys() == {*names}
    assert all(row["max_diff"] < 1e-5 for name, row in forms.items() if name != ONE_BY_ONE.name)
    assert all(row["seq_s"][0] > 0 for row in forms.values())


@pytest.mark.slow
def test_a_round_of_guerdon_and_transformers_agrees(tmp_path: Path) -> None:
    from in_process import ENGINE, ONE_BY_ONE, SORTED

    names = ["guerdon, one request per prompt", ENGINE.name, ONE_BY_ONE.name, SORTED.name]
    absent = ["Ray Serve, one request per prompt", "in process: OpenVINO, queued"]
    found = _one_round([*names, *absent], tmp_path / "none", tmp_path)
    assert found["missing"] == dict.fromkeys(absent, "no environment")
    _check_forms(found["cells"][0]["forms"], names)


@pytest.mark.slow
@pytest.mark.skipif(not (ENVIRONMENTS / "openvino").exists(), reason="`make bench` installs OpenVINO and ONNX Runtime")
def test_a_round_of_openvino_and_onnx_runtime_agrees(tmp_path: Path) -> None:
    from in_process import IN_PROCESS, ONE_BY_ONE

    names = [form.name for form in IN_PROCESS if form.environment or form == ONE_BY_ONE]
    found = _one_round(names, ENVIRONMENTS, tmp_path)
    assert len(names) == 4 and found["missing"] == {}
    _check_forms(found["cells"][0]["forms"], names)
