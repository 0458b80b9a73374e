"""autotune=True and tune(): measured once, remembered, and nothing else changes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import moegemm
import pytest
import torch
from conftest import make_case

ROOT = Path(__file__).resolve().parents[3]
AMPLE = 20.0  # seconds for what takes milliseconds: a busy machine must not use them up


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """A cache of its own for each test: also what the process remembers is kept by folder."""
    monkeypatch.setenv("MOEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MOEGEMM_AUTOTUNE", raising=False)
    return tmp_path


def entries() -> list[dict]:
    return moegemm.tuning_cache()["entries"]


def product(case, **more):
    return moegemm.grouped_gemm(
        case.X, case.W, case.m_sizes, case.topk, case.gather_indices, case.permute_x, case.permute_y,
        case.topk_weights, case.fuse_mul_post, is_first_gemm=not case.permute_y, **more,
    )  # fmt: skip


@pytest.mark.parametrize("flags", ["plain", "permute_x", "permute_y_mul"])
def test_autotune_changes_no_bit_of_result_or_gradients(device, flags):
    case = make_case(device, flags, dtype=torch.bfloat16, k=64, n=48)
    case.X.requires_grad_()
    case.W.requires_grad_()
    plain = product(case)
    dY = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, [case.X, case.W], dY)
    tuned = product(case, autotune=True)
    got = torch.autograd.grad(tuned, [case.X, case.W], dY)
    assert torch.equal(plain, tuned)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert entries(), "dX and dW have several kernels on every backend"


def test_problem_is_measured_once_per_bucket_and_kept_in_the_file(cache_folder):
    case = make_case(tokens=13, dtype=torch.bfloat16)
    reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE)
    assert [r["problem"].split()[0] for r in reports] == ["forward", "dX", "dW"]
    assert [r["measured"] for r in reports] == [False, True, True]  # one forward kernel on the CPU
    assert all(len(r["steps"]) == 1 and r["kernel"] in r["steps"][0] for r in reports)  # no pass on the CPU
    again = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE)
    assert not any(r["measured"] for r in again)
    other = make_case(tokens=15, dtype=torch.bfloat16)  # the same bucket: up to 16
    assert not any(r["measured"] for r in moegemm.tune(other.X, other.W, other.m_sizes, other.topk, budget=AMPLE))
    stored = json.loads((cache_folder / "tuning.json").read_text())
    assert len(stored["entries"]) == 2
    assert {e["version"] for e in stored["entries"]} == {moegemm.__version__}
    forced = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, again=True, budget=AMPLE)
    assert forced[1]["measured"]
    candidates = {c["kernel"]: c for c in forced[1]["candidates"]}
    assert len(candidates) >= 3
    assert sum(c["outcome"] == "fastest" for c in candidates.values()) == 1


@pytest.mark.parametrize("frozen_router", [False, True])
def test_training_uses_what_tune_measured(device, frozen_router):
    case = make_case(device, "permute_y_mul", dtype=torch.bfloat16, k=64, n=48)
    case.X.requires_grad_()
    case.W.requires_grad_()
    case.topk_weights.requires_grad_(not frozen_router)
    moegemm.tune(
        case.X, case.W, case.m_sizes, case.topk, case.gather_indices, case.permute_x, case.permute_y,
        case.topk_weights, case.fuse_mul_post, budget=AMPLE,
    )  # fmt: skip
    known = sorted(entry["problem"] for entry in entries())
    assert known, "dX and dW have several kernels on every backend"
    product(case, autotune=True).sum().backward()
    assert sorted(entry["problem"] for entry in entries()) == known, "backward measured something else"


def test_tensors_and_random_state_stay_as_they_are(device):
    case = make_case(device, "permute_x", dtype=torch.bfloat16)
    tensors = [case.X, case.W, case.m_sizes, case.gather_indices]
    before = [t.clone() for t in tensors]
    state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None
    moegemm.tune(case.X, case.W, case.m_sizes, case.topk, case.gather_indices, permute_x=True, budget=AMPLE)
    product(case, autotune=True)
    assert torch.equal(torch.get_rng_state(), state)
    if cuda_state is not None:
        assert torch.equal(torch.cuda.get_rng_state(), cuda_state)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_launches_rotate_through_copies_of_a_small_problem(device):
    case = make_case(device, "permute_x", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, case.gather_indices, permute_x=True, budget=AMPLE)
    measured = [r for r in reports if r["measured"]]
    assert measured
    for report in measured:
        assert report["operand_sets"] > 1
        assert not report["flushed"]
        # All sets exceed twice the cache, which is at least 8 MiB; their padding is bounded.
        assert 16 << 20 <= report["memory_bytes"] <= 1 << 30
    if device == "cuda":
        assert torch.cuda.memory_allocated() == before, "scratch memory is given back"


def test_accumulating_call_adds_exactly_once():
    case = make_case(dtype=torch.bfloat16)
    dY = torch.randn(case.rows, 24).bfloat16()
    out = torch.ones(5, 24, 40)
    moegemm.grouped_gemm_dW(case.X, dY, case.m_sizes, None, case.topk, autotune=True, out=out, accumulate=True)
    expected = moegemm.grouped_gemm_dW(case.X, dY, case.m_sizes, None, case.topk, out_dtype=torch.float32)
    assert torch.allclose(out, expected + 1)


def test_environment_forbids_measuring(monkeypatch):
    monkeypatch.setenv("MOEGEMM_AUTOTUNE", "0")
    case = make_case(dtype=torch.bfloat16)
    reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE)
    assert all(r["why_not"] == "MOEGEMM_AUTOTUNE is 0" for r in reports)
    dY = torch.randn(case.rows, 24).bfloat16()
    moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk, autotune=True)
    assert entries() == []


def test_nothing_is_measured_while_tracing():
    case = make_case(dtype=torch.bfloat16)
    dY = torch.randn(case.rows, 24).bfloat16()

    def gradient(dY, W, m_sizes):
        return moegemm.grouped_gemm_dX(dY, W, None, m_sizes, case.topk, autotune=True)

    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(gradient)(dY, case.W, case.m_sizes)
    assert entries() == []
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(dY, case.W, case.m_sizes), gradient(dY, case.W, case.m_sizes))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_nothing_is_measured_during_graph_capture():
    case = make_case("cuda", dtype=torch.bfloat16, n=64, k=64)
    dY = torch.randn(case.rows, 64, device="cuda").bfloat16()
    moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dX = moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk, autotune=True)
    assert entries() == []
    graph.replay()
    expected = moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk)
    assert torch.equal(dX, expected)


def test_progress_sees_each_candidate_and_may_end_it():
    case = make_case(dtype=torch.bfloat16)
    seen = []
    reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE, progress=seen.append)
    assert not any(r["interrupted"] for r in reports)
    assert {s["candidate"] for s in seen} == {1, 2, 3}
    assert all(0 <= s["done"] <= 1 and s["seconds_left"] <= AMPLE for s in seen)
    stopped = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, again=True, budget=AMPLE, progress=lambda s: False)
    assert [r["interrupted"] for r in stopped] == [False, True], "dW is not begun after dX was ended"


def test_ctrl_c_keeps_what_was_found_and_is_raised():
    case = make_case(dtype=torch.bfloat16)

    with_best = []

    def interrupt(now):
        if now["best"]:
            with_best.append(now)
        if len(with_best) == 2:  # two candidates have been timed: enough to choose
            signal.raise_signal(signal.SIGINT)  # os.kill may let another thread take it, later

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(entries()) == 1


def test_progress_may_make_calls_that_tune():
    case = make_case(dtype=torch.bfloat16)
    other = make_case(dtype=torch.bfloat16, n=32)
    dY = torch.randn(case.rows, 24).bfloat16()
    inside = []

    def call(now):
        moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk, autotune=True)
        inside.extend(moegemm.tune(other.X, other.W, other.m_sizes, other.topk, budget=AMPLE))

    reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE, progress=call)
    assert [r["measured"] for r in reports] == [False, True, True], "the calls do not end the measurement"
    assert {(r["measured"], r["why_not"]) for r in inside} == {(False, "this thread is measuring already")}


def test_progress_may_wait_for_a_thread_that_tunes():
    case = make_case(dtype=torch.bfloat16)
    other = make_case(dtype=torch.bfloat16, n=32)
    reports = []

    def wait(now):
        if not reports:
            thread = threading.Thread(
                target=lambda: reports.extend(moegemm.tune(other.X, other.W, other.m_sizes, other.topk, budget=AMPLE))
            )
            thread.start()
            thread.join()

    moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE, progress=wait)
    assert [r["measured"] for r in reports] == [False, True, True]


def test_exception_in_progress_ends_the_measurement_and_is_raised():
    case = make_case(dtype=torch.bfloat16)

    def fail(now):
        raise LookupError(now["kernel"])

    with pytest.raises(LookupError, match="dX"):
        moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE, progress=fail)
    reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE)
    assert [r["measured"] for r in reports] == [False, True, True]


def test_warm_up_that_uses_up_the_budget_settles_on_the_heuristics_kernel():
    case = make_case(dtype=torch.bfloat16)
    for _ in range(2):
        _, dX, dW = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=1e-9)
        for report in (dX, dW):
            assert not report["measured"]
            assert "the whole budget of 1e-09 s" in report["why_not"]
    assert entries() == []
    seen = []
    moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=1e-9, progress=seen.append)
    assert seen == [], "later calls do not measure again"


def test_cache_folder_that_is_not_utf8(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    monkeypatch.setenv("MOEGEMM_CACHE_DIR", os.fsdecode(folder))
    case = make_case(dtype=torch.bfloat16)
    moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE)
    cache = moegemm.tuning_cache()
    assert os.fsencode(cache["path"]) == folder + b"/tuning.json"
    assert os.path.isfile(cache["path"])
    assert len(cache["entries"]) == 2


def test_measurement_that_is_not_saved_says_why(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MOEGEMM_CACHE_DIR", os.fsdecode(os.fsencode(tmp_path) + b"/file/caf\xe9"))
    case = make_case(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="this process only: cannot create .*file/caf\ufffd"):
        reports = moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=AMPLE)
    assert reports[0]["not_saved"] == ""
    assert all("cannot create" in report["not_saved"] for report in reports[1:])


def test_corrupt_cache_is_warned_of_once_and_the_call_goes_on(cache_folder):
    (cache_folder / "tuning.json").write_text("{ not json")
    case = make_case(dtype=torch.bfloat16)
    dY = torch.randn(case.rows, 24).bfloat16()
    with pytest.warns(UserWarning, match="is ignored: it is not JSON"):
        first = moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk, autotune=True)
    # The second call must not warn: warnings of this package are errors in the tests.
    second = moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk, autotune=True)
    assert torch.equal(first, second)
    assert len(entries()) == 1


def test_budget_outside_its_range_is_refused():
    case = make_case()
    with pytest.raises(ValueError, match="budget is 0"):
        moegemm.tune(case.X, case.W, case.m_sizes, case.topk, budget=0)


def test_another_process_uses_what_this_one_measured(cache_folder):
    script = textwrap.dedent("""
        import json, torch, moegemm
        torch.manual_seed(0)
        X, W = torch.randn(16, 32).bfloat16(), torch.randn(2, 24, 32).bfloat16()
        reports = moegemm.tune(X, W, torch.tensor([9, 7]), 1, budget=20)
        print(json.dumps([r["measured"] for r in reports]))
    """)
    measured = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
            capture_output=True,
            text=True,
            check=True,
        )
        measured.append(json.loads(done.stdout))
    assert measured == [[False, True, True], [False, False, False]]


@pytest.mark.parametrize("budget", [0, -1, 3601, float("nan")])
def test_a_budget_is_a_time_that_somebody_may_wait(budget):
    X, W = torch.randn(6, 16), torch.randn(4, 8, 16)
    with pytest.raises(ValueError, match="seconds above 0 and up to 3600 are accepted"):
        moegemm.tune(X, W, torch.tensor([3, 0, 1, 2]), topk=1, budget=budget)
