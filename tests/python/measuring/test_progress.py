"""What measurements show of themselves: a bar on a terminal, and in a log lines or nothing."""

import io
import sys

import pytest
from moegemm.bench.progress import Progress
from moegemm.tuning.autotune import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tuning_draws_one_line_on_a_terminal_and_erases_it():
    screen = Terminal()
    bar = Bar(screen)
    bar.draw("forward bf16", "simd_16x32", 1, 3, "", 0.0, 0.1, 1.5)
    bar.draw("forward bf16", "simd_32x32", 2, 3, "simd_16x32", 12.34, 0.6, 0.7)
    bar._drawn.refresh()
    shown = screen.getvalue().rsplit("\r", 1)[-1]
    assert shown.startswith("[")
    assert "forward bf16: 2/3 simd_32x32; best simd_16x32 12.3 us; 0.7 s left" in shown
    bar.erase()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().rsplit("\r", 2)[-2].strip() == ""
    bar.draw("dX bf16", "simd_16x32", 1, 2, "", 0.0, 0.0, 2.0)  # the next problem begins anew
    bar._drawn.refresh()
    assert "dX bf16: 1/2 simd_16x32; best -; 2.0 s left" in screen.getvalue()
    bar.erase()


def test_tuning_shows_nothing_in_a_log():
    log = io.StringIO()
    bar = Bar(log)
    bar.draw("forward bf16", "simd_16x32", 1, 3, "", 0.0, 0.1, 1.5)
    bar.erase()
    assert log.getvalue() == ""


def test_measuring_tells_a_log_each_case_in_a_line(capsys: pytest.CaptureFixture[str]):
    with Progress(12, done=8) as progress:
        progress.step("first")
        progress.step("second")
    assert capsys.readouterr().err == "[ 9/12] first\n[10/12] second\n"


def test_measuring_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress(2) as progress:
        progress.step("first")
        progress.step("second")
    shown = screen.getvalue().rsplit("\r", 1)[-1]
    assert "2/2" in shown
    assert "second" in shown
    assert shown.endswith("\n")
