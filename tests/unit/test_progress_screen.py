from __future__ import annotations

import io
import math
import os
import re

import pytest

from raytrain_bert.progress.format import amount, clean, duration, fit, wrap
from raytrain_bert.progress.screen import Screen, Summary

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SCORES = {"accuracy": 0.973, "macro_f1": 0.9719, "weighted_f1": 0.97, "mcc": 0.96, "loss": 0.1043}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def ready(**changes):
    return {
        "event": "ready",
        "device": "CPU",
        "world_size": 2,
        "threads": 1,
        "precision": "fp32",
        "parameters": 22_713_000,
        "trainable_parameters": 22_713_000,
        "tokens_per_micro_batch": 4096,
        "steps_per_epoch": 10,
        "global_batch_size": 32,
        "total_steps": 20,
        **changes,
    }


def steps(step: int, *, seconds: float = 2.0, loss: float = 0.5, total_steps: int = 20, epoch: int = 0):
    record = {
        "epoch": epoch,
        "step": step,
        "loss": loss,
        "grad_norm": 1.25,
        "learning_rate": 5e-5,
        "rows": 32,
        "tokens": 950,
        "padded_tokens": 1000,
    }
    return {"event": "steps", "records": [record], "total_steps": total_steps, "seconds": seconds}


def validation(epoch: float, step: int, *, is_best: bool = True, rows: int = 445, seconds: float = 3.0):
    scores = {**SCORES, "rows_seen": rows, "rows": rows}
    return {
        "event": "validation",
        "epoch": epoch,
        "step": step,
        "scores": scores,
        "is_best": is_best,
        "seconds": seconds,
    }


def play(screen: Screen, clock: Clock) -> None:
    """A whole run of two epochs with ten steps each."""
    screen.phase("starting Ray")
    clock.wait(9.2)
    screen.facts([("data", "reviews.csv, 445 rows"), ("labels", "5")])
    screen.phase("reading the data")
    clock.wait(0.5)
    screen.handle({"event": "phase", "text": "loading the model"})
    clock.wait(0.3)
    screen.handle(ready())
    for epoch in range(2):
        for step in range(1, 11):
            clock.wait(2)
            screen.handle(steps(10 * epoch + step, epoch=epoch))
        clock.wait(3)
        screen.handle({"event": "evaluating", "split": "validation", "rows_done": 200, "rows": 445})
        screen.handle(validation(epoch + 1.0, 10 * epoch + 10, is_best=epoch == 0))
        clock.wait(1)
        screen.handle({"event": "checkpoint", "step": 10 * epoch + 10, "path": "runs/a/checkpoints/x", "seconds": 1.0})
    screen.handle({"event": "phase", "text": "testing the best checkpoint"})
    clock.wait(2)
    screen.handle({"event": "test", "scores": {**SCORES, "rows_seen": 222, "rows": 222}, "seconds": 2.0})
    screen.closing(Summary("runs/a", command="python -m raytrain_bert.predict runs/a --text " + 80 * "x"))
    screen.close()


CLOSING = f"""\
finished in 1 min 00 s

                validation        test
accuracy            0.9730      0.9730
macro F1            0.9719      0.9719
weighted F1         0.9700      0.9700
MCC                 0.9600      0.9600
loss                0.1043      0.1043
rows               445/445     222/222

best          epoch 1/2, step 10: validation accuracy 0.9730
time          start-up 10 s, training 40 s, validation 6.0 s, saving 2.0 s, test 2.0 s
speed         16 rows/s, 475 tokens/s in training
run folder    runs/a
use the model
  python -m raytrain_bert.predict runs/a --text {80 * "x"}
"""


def test_a_run_as_plain_lines(clock):
    file = io.StringIO()
    play(Screen(file, clock=clock), clock)
    assert file.getvalue() == (
        """\
starting Ray ...
✓ starting Ray  9.2 s
data          reviews.csv, 445 rows
labels        5
reading the data ...
loading the model ...
devices       CPU, 2 workers, 1 thread each
precision     fp32
parameters    22.7M, all trained
batch         32 rows a step over all workers
steps         20, 10 an epoch
epoch 1/2  step 1/20  5 %  loss 0.5000  16 rows/s  475 tokens/s  padding 5 %
epoch 1/2  step 6/20  30 %  loss 0.5000  16 rows/s  475 tokens/s  padding 5 %  28 s left
epoch 1/2  step 10  accuracy 0.9730  macro F1 0.9719  loss 0.1043  445/445 rows  ★ best
epoch 2/2  step 11/20  55 %  loss 0.5000  16 rows/s  475 tokens/s  padding 5 %  22 s left
epoch 2/2  step 16/20  80 %  loss 0.5000  16 rows/s  475 tokens/s  padding 5 %  9.6 s left
epoch 2/2  step 20  accuracy 0.9730  macro F1 0.9719  loss 0.1043  445/445 rows
✓ training, 20 steps  48 s
testing the best checkpoint ...
✓ testing the best checkpoint  2.0 s

"""
        + CLOSING
    )


def test_quiet_shows_nothing_but_the_closing_table(clock):
    file = io.StringIO()
    screen = Screen(file, quiet=True, clock=clock)
    screen.warning("not shown")
    screen.note("not shown")
    play(screen, clock)
    assert file.getvalue() == CLOSING


def test_quiet_shows_errors(clock):
    file = io.StringIO()
    screen = Screen(file, quiet=True, clock=clock)
    screen.phase("reading")
    screen.error("data error", "a.csv: no column 'label'.\nSet --data.label-column.")
    assert file.getvalue() == "data error: a.csv: no column 'label'.\n  Set --data.label-column.\n"


def test_verbose_tells_more(clock):
    file = io.StringIO()
    play(Screen(file, verbose=True, clock=clock), clock)
    shown = file.getvalue()
    assert "micro batches up to 4,096 tokens, padding included\n" in shown
    assert "loss 0.5000  gradient norm 1.25  learning rate 5.00e-05  16 rows/s" in shown
    assert "checkpoint after step 10 in 1.0 s: runs/a/checkpoints/x\n" in shown
    assert "macro F1 0.9719  weighted F1 0.9700  MCC 0.9600  loss 0.1043  445/445 rows  3.0 s  ★ best\n" in shown


def test_plain_progress_comes_every_ten_seconds_or_ten_percent_and_once_a_minute(clock):
    def lines_of(total_steps: int, seconds: float, number: int) -> list[int]:
        file = io.StringIO()
        screen = Screen(file, clock=clock)
        for step in range(1, number + 1):
            clock.wait(seconds)
            screen.handle(steps(step, seconds=seconds, total_steps=total_steps))
        return [int(step) for step in re.findall(r"step (\d+)/", file.getvalue())]

    assert lines_of(total_steps=50, seconds=1, number=50) == [1, 11, 21, 31, 41]
    assert lines_of(total_steps=20, seconds=100, number=4) == [1, 2, 3, 4]
    assert lines_of(total_steps=100_000, seconds=1, number=150) == [1, 61, 121]


def test_plain_evaluation_progress_comes_only_when_it_takes_long(clock):
    file = io.StringIO()
    screen = Screen(file, clock=clock)
    for done in range(0, 1000, 20):
        screen.handle({"event": "evaluating", "split": "validation", "rows_done": done, "rows": 1000})
        clock.wait(0.5)
    assert file.getvalue() == "validating  400/1,000 rows\nvalidating  800/1,000 rows\n"


def test_no_control_codes_where_no_terminal_is(clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    screen = Screen(file, clock=clock)
    play(screen, clock)
    screen.error("fault", "x")
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_plain_lines_that_fit(clock, terminal, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    play(Screen(terminal, clock=clock, width=80), clock)
    assert "\x1b" not in terminal.getvalue()
    # The command to copy is the one thing that is never broken.
    assert all(len(line) <= 80 for line in terminal.getvalue().split("\n") if "xxx" not in line)


@pytest.mark.parametrize("width", [120, 80, 40])
def test_what_a_terminal_shows_fits_into_its_width(clock, terminal, width):
    screen = Screen(terminal, clock=clock, width=width)
    screen.warning("two workers share two CPUs, which is slower than one of them with both for a model of this size")
    play(screen, clock)
    shown = CONTROL.sub("", terminal.getvalue())
    assert "✓ starting Ray  9.2 s" in shown
    lines = [line for line in re.split(r"[\r\n]+", shown) if "xxx" not in line]
    assert max(map(len, lines)) <= width


def test_the_live_view_shows_bar_rates_and_time_left(clock, terminal):
    screen = Screen(terminal, clock=clock, width=80)
    screen.handle(ready())
    for step in range(1, 6):
        clock.wait(2)
        screen.handle(steps(step))
    assert screen._live is not None
    screen._live.refresh()
    screen.close()
    shown = CONTROL.sub("", terminal.getvalue())
    assert re.search(r"epoch 1/2  [━╸╺]{30,}  step 5/20  25 %\n", shown)
    assert "loss 0.5000  16 rows/s  475 tokens/s  padding 5 %  30 s left" in shown


@pytest.mark.parametrize("width", [30, 12, 5])
def test_the_live_view_never_wraps(clock, terminal, width):
    screen = Screen(terminal, clock=clock, width=width)
    screen.phase("a phase with quite a long name")
    assert screen._live is not None
    screen._live.refresh()
    screen.close()
    for step in (1, 2):
        screen.handle(steps(step))
    screen._live.refresh()
    screen.close()
    lines = re.split(r"[\r\n]+", CONTROL.sub("", terminal.getvalue()))
    assert max(map(len, lines)) <= width
    assert any(line.startswith("loss"[:width]) for line in lines)


def test_the_live_view_says_when_nothing_comes(clock, terminal):
    screen = Screen(terminal, clock=clock, width=80)
    for step in (1, 2):
        screen.handle(steps(step))
    clock.wait(75)
    assert screen._live is not None
    screen._live.refresh()
    screen.close()
    assert "no news for 1 min 15 s" in terminal.getvalue()


def test_the_terminal_is_left_with_its_cursor(clock, terminal):
    screen = Screen(terminal, clock=clock, width=80)
    screen.phase("working")
    screen.error("fault", "it broke")
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")
    assert CONTROL.sub("", terminal.getvalue()).endswith("✗ working  0.0 s\nfault: it broke\n")


def test_no_color_is_heeded(clock, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(terminal, clock=clock, width=80)
    play(screen, clock)
    screen.error("fault", "x")
    colours = [code for code in re.findall(r"\x1b\[([0-9;]*)m", terminal.getvalue()) if re.search(r"\b[349]\d\b", code)]
    assert colours == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_ascii_stream_gets_ascii(clock, monkeypatch, is_terminal):
    monkeypatch.setenv("TERM", "xterm")
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(file, "isatty", lambda: is_terminal, raising=False)
    screen = Screen(file, clock=clock, width=80)
    play(screen, clock)
    screen.note("größer")
    file.flush()
    shown = CONTROL.sub("", raw.getvalue().decode("ascii"))
    assert "- starting Ray  9.2 s\n" in shown
    assert "* best\n" in shown
    assert shown.endswith("gr??er\n")


def test_the_run_goes_on_when_nobody_reads(clock):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", closefd=True) as file:
        screen = Screen(file, clock=clock)
        play(screen, clock)
        # What the file itself still holds back cannot be written either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


def test_a_process_without_standard_output_has_a_silent_screen(clock):
    play(Screen(None, clock=clock), clock)


def test_errors_go_to_their_own_stream(clock):
    out, err = io.StringIO(), io.StringIO()
    Screen(out, errors=err, clock=clock).error("config error", "optim.learning_rate: not a number")
    assert (out.getvalue(), err.getvalue()) == ("", "config error: optim.learning_rate: not a number\n")


def test_text_is_shown_as_it_is_and_cannot_steer_the_terminal(clock):
    file = io.StringIO()
    screen = Screen(file, clock=clock)
    screen.note("[bold]a[/bold] :smile: \x1b[2Jb\tc\rd")
    screen.facts([("labels", "[red]\x07")])
    assert file.getvalue() == "[bold]a[/bold] :smile: ?[2Jb c?d\nlabels        [red]?\n"


def test_lost_workers_and_what_follows_are_told_in_a_line_each(clock):
    file = io.StringIO()
    screen = Screen(file, clock=clock)
    screen.handle({"event": "lost", "reasons": {"1": "the process has died"}})
    screen.handle({"event": "started", "step": 1200, "world_size": 1, "world_size_before": 2})
    screen.handle({"event": "skipped", "step": 1300, "loss": math.nan, "skipped": 2, "rows": "a.csv row 5"})
    screen.handle({"event": "taken_away", "ranks": [0, 1], "deadline_ms": None})
    assert file.getvalue().splitlines() == [
        "warning: worker 1: the process has died. New workers go on from the last checkpoint.",
        "going on after step 1,200 with 1 worker in place of 2: the same rows a step, the same curve",
        "warning: step 1,300 has no finite gradient (loss nan) and is left out (2 so far); a.csv row 5.",
        "warning: Ray announces that the machine of worker 0, 1 will be taken away; saving now.",
    ]


def test_the_metric_that_chooses_is_always_shown(clock, terminal):
    screen = Screen(terminal, clock=clock, width=50)
    screen.best_metric = "mcc"
    screen.handle(validation(0.5, 5))
    assert "MCC 0.9600" in terminal.getvalue()
    assert "epoch 0.50" in terminal.getvalue()


def test_validation_lines_of_a_run_have_the_same_columns(clock, terminal):
    screen = Screen(terminal, clock=clock, width=80)
    screen.handle(validation(1.0, 56, is_best=True))
    screen.handle(validation(2.0, 112, is_best=False))
    first, second = CONTROL.sub("", terminal.getvalue()).splitlines()
    assert first.replace("epoch 1", "epoch 2") == second + "  ★ best"


def test_closing_of_a_resumed_run_shows_the_best_of_before(clock):
    file = io.StringIO()
    screen = Screen(file, clock=clock)
    screen.handle({"event": "started", "step": 10})
    screen.handle(validation(2.0, 20, is_best=False))
    screen.closing(
        Summary("runs/a", best={"epoch": 1.0, "step": 10, "metric": "accuracy", "score": 0.99}, test={"accuracy": None})
    )
    shown = file.getvalue()
    assert "going on after step 10\n" in shown
    assert "best          epoch 1, step 10: validation accuracy 0.9900\n" in shown
    assert re.search(r"^ +test$", shown, re.MULTILINE)
    assert re.search(r"^accuracy +-$", shown, re.MULTILINE)


def test_closing_of_an_interrupted_run_says_how_to_go_on(clock):
    file = io.StringIO()
    screen = Screen(file, clock=clock)
    command = "python -m raytrain_bert.train --resume runs/a"
    screen.closing(Summary("runs/a", status="interrupted after step 7", command=command, command_label="go on with"))
    assert file.getvalue() == (
        f"\ninterrupted after step 7 in 0.0 s\n\nrun folder    runs/a\ngo on with\n  {command}\n"
    )


def test_unknown_events_are_left_alone(clock):
    file = io.StringIO()
    Screen(file, clock=clock).handle({"event": "of a later version"})
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.1, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (151, "2 min 31 s"),
        (3599.7, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (273_600, "3 d 04 h"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.84, "3.8"), (382.4, "382"), (9_999, "9,999"), (15_234, "15.2k"), (22_713_000, "22.7M"), (7.6e9, "7.6B")],
)
def test_amounts_read_well(value, text):
    assert amount(value) == text


def test_fit_leaves_out_the_least_important_first():
    items = [("epoch 1", 0), ("loss 0.5", 1), ("rows 3", 3), ("padding", 2)]
    assert fit(items, None) == "epoch 1  loss 0.5  rows 3  padding"
    assert fit(items, 30) == "epoch 1  loss 0.5  padding"
    assert fit(items, 1) == "epoch 1"


def test_wrap_keeps_words_units_and_indents():
    path = "/a/very/long/path/that/does/not/fit"
    assert wrap(f"it is in {path} now", 20, indent=2) == f"it is in\n  {path}\n  now"
    assert wrap("training took 12 s or so", 16) == "training took\n12 s or so"
    assert wrap("a:\n  - one two three", 11) == "a:\n  - one two\n  three"
    assert wrap("大大 大大", 8) == "大大\n大大"


def test_clean_leaves_letters_of_every_script():
    assert clean("größer 大 é\n") == "größer 大 é\n"
    assert clean("a\x00b\x7f\x9bc") == "a?b??c"
