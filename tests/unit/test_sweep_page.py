"""The page of a sweep: what a browser makes of it, and what is drawn."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_bert.config.load import load_config
from raytrain_bert.sweep.figures import Figure, learning_curves, parallel_axis, scatter, sections_of
from raytrain_bert.sweep.page import STALE_SECONDS, Page
from raytrain_bert.sweep.records import SweepFolder, Trial, best_of
from raytrain_bert.sweep.screen import Now
from raytrain_bert.sweep.space import Space, read_space
from tests.browser import needs_browser, page_in_browser

RATE, SIZE, POOLING = "optim.learning_rate", "train.global_batch_size", "model.pooling"
SEARCH = {
    RATE: {"loguniform": [1e-5, 1e-3]},
    SIZE: {"choice": [16, 32, 64]},
    POOLING: {"choice": ["mean", "cls"], "when": {SIZE: 32}},
}
NUMBERED = {"trial": "number", "score": "score", "best_score": "best_score", "epoch": "epoch", "seconds": "seconds"}


def space() -> Space:
    return read_space(SEARCH, load_config({"data.train": ["x.csv"]}))


def trial(folder: SweepFolder, number: int, scores: list[float], status: Any = "trained", **sample: Any) -> Trial:
    """A trial with a validation an epoch of 11 steps, and its run folder."""
    run = folder.trial(number)
    run.path.mkdir(parents=True)
    records = [
        {"kind": "validation", "epoch": float(n), "step": 11 * n, "accuracy": value}
        for n, value in enumerate(scores, 1)
    ]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    best = max(range(len(scores)), key=lambda n: scores[n]) if scores else None
    return Trial(
        number,
        {RATE: number * 1e-4, SIZE: 32} | sample,
        status=status,
        why='a "reason" <i>with</i> markup' if status == "failed" else "",
        epoch=float(len(scores)) if scores else None,
        step=11 * len(scores) if scores else None,
        score=scores[-1] if scores else None,
        best_score=None if best is None else scores[best],
        best_epoch=None if best is None else best + 1.0,
        best_step=None if best is None else 11 * (best + 1),
        seconds=1.5 * number,
    )


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "a <sweep>")


@pytest.fixture
def trials(folder: SweepFolder) -> list[Trial]:
    return [
        trial(folder, 1, [0.5, 0.61234567, 0.6]),
        trial(folder, 2, [0.7], "stopped", **{SIZE: 16}),
        trial(folder, 3, [0.4, 0.45], "failed"),
        trial(folder, 4, [], "running", **{SIZE: 32, POOLING: "mean"}),
        trial(folder, 5, [0.55], **{POOLING: "cls"}),
    ]


def now(trials: list[Trial], unit: str = "epochs", eta: float | None = 24.0) -> Now:
    return Now(trials, space().keys, "accuracy", 8, 60.0, eta, unit)


def traces(figure: Figure | None) -> list[dict[str, Any]]:
    assert figure is not None
    found: list[dict[str, Any]] = figure.content["data"]
    return found


def cells_of(page: str) -> dict[int, dict[str, str]]:
    """The exact values of the table by trial and name."""
    rows = re.findall(r'<tr[^>]*data-trial="(\d+)">(.*?)</tr>', page, re.DOTALL)
    cell = re.compile(r'data-name="([^"]*)" data-value="([^"]*)"')
    return {int(number): {name: html.unescape(value) for name, value in cell.findall(row)} for number, row in rows}


@needs_browser
def test_a_browser_shows_the_numbers_of_the_trials_and_draws_every_figure(
    folder: SweepFolder, trials: list[Trial]
) -> None:
    Page(folder, space(), folder.path.name).update(now(trials))
    page = page_in_browser(folder.page_path)
    cells = cells_of(page)
    assert list(cells) == [2, 1, 5, 3, 4]  # best first; without a score, and failed ones, last
    for number, found in cells.items():
        expected = trials[number - 1]
        for name, attribute in NUMBERED.items():
            value = getattr(expected, attribute)
            assert found[name] == ("" if value is None else json.dumps(value))
        assert json.loads(found[RATE]) == expected.sample[RATE]
    assert cells[3]["why"] == trials[2].why
    assert "<i>with</i>" not in page
    assert '<tr class="winner" data-trial="2">' in page
    drawn = re.findall(r'<div id="([\w-]+)"[^>]*class="js-plotly-plot"', page)
    assert drawn == ["parallel", "curves", "scatter-0", "scatter-1", "scatter-2"]
    assert len(re.findall(r'class="trace scatter', page)) == 4 + 3  # a curve for each that validated; a plot a setting


@needs_browser
def test_a_page_that_nothing_writes_any_more_says_so(
    folder: SweepFolder, trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = time.time() - STALE_SECONDS - 120
    monkeypatch.setattr(time, "time", lambda: written)
    Page(folder, space(), "sweep").update(now(trials))
    page = page_in_browser(folder.page_path)
    assert "Nothing new for 3 min" in page
    assert "24 s left" not in page.partition("<script>")[0]
    monkeypatch.undo()
    Page(folder, space(), "sweep").update(now(trials), always=True)
    fresh = page_in_browser(folder.page_path)
    assert "Nothing new" not in fresh.partition("<script>")[0]
    assert "about 24 s left" in fresh


def test_a_page_is_written_when_there_is_news_and_as_a_sign_of_life(
    folder: SweepFolder, trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    page = Page(folder, space(), "sweep")

    def is_written(seconds: float, *, news: bool) -> bool:
        folder.page_path.unlink(missing_ok=True)
        clock[0] += seconds
        page.update(now(trials), news=news)
        return folder.page_path.exists()

    assert is_written(0, news=True)
    assert [is_written(1, news=True), is_written(3, news=True)] == [False, True]
    assert [is_written(10, news=False), is_written(10, news=False)] == [False, True]


def test_only_a_running_sweep_reloads_itself(folder: SweepFolder, trials: list[Trial]) -> None:
    page = Page(folder, space(), "sweep")
    page.update(now(trials), always=True)
    assert "http-equiv" in folder.page_path.read_text(encoding="utf-8")
    page.update(now(trials, eta=None), status="finished", always=True, test={"accuracy": 0.75, "loss": None})
    text = folder.page_path.read_text(encoding="utf-8")
    assert "http-equiv" not in text
    assert "accuracy <b>0.7500</b>" in text


def test_a_sweep_by_steps_is_shown_by_steps(folder: SweepFolder, trials: list[Trial]) -> None:
    figure = learning_curves(folder, now(trials, "steps"), best_of(trials, "accuracy"))
    assert traces(figure)[0]["x"] == [11, 22, 33]
    Page(folder, space(), "sweep").update(now(trials, "steps"))
    text = folder.page_path.read_text(encoding="utf-8")
    assert 'data-name="best_step" data-value="22"' in text
    assert "at step 11" in text  # of the best trial


def test_curves_mark_the_end_of_what_was_stopped_and_show_a_single_validation(
    folder: SweepFolder, trials: list[Trial]
) -> None:
    curves = {t["meta"]["trial"]: t for t in traces(learning_curves(folder, now(trials), best_of(trials, "accuracy")))}
    assert curves[1]["y"] == [0.5, 0.61234567, 0.6]
    assert curves[3]["marker"]["symbol"] == ["circle", "x"]
    assert curves[5]["marker"]["size"] == [10]
    named = [trace["name"] for trace in curves.values() if trace["showlegend"]]
    assert named == ["trained", "best: trial 2", "failed"]


def test_nothing_is_drawn_of_trials_that_have_not_validated(folder: SweepFolder) -> None:
    (section,) = sections_of(folder, space(), now([trial(folder, 1, [], "running")]))
    assert (section.title, list(section.figures), section.note) == ("Learning curves", [], "No validation yet.")


def test_axes_show_the_domain_and_not_only_what_was_tried(folder: SweepFolder, trials: list[Trial]) -> None:
    scored = [t for t in trials if t.best_score is not None and t.sample[SIZE] == 32]
    figures = scatter(scored, space(), now(trials), None)
    rate, size = (figure.content["layout"]["xaxis"] for figure in figures[:2])
    assert rate["type"] == "log"
    assert rate["range"][0] < -5
    assert rate["range"][1] > -3
    assert size["categoryarray"] == ["16", "32", "64"]
    assert traces(figures[1])[0]["x"] == ["32"] * 3
    domains = {domain.key: domain for domain in space().domains}
    assert parallel_axis(domains[SIZE], [32, 32])["ticktext"] == ["16", "32", "64"]
    pooling = parallel_axis(domains[POOLING], ["cls", None])
    assert (pooling["values"], pooling["ticktext"]) == ([1, -1], ["unset", "mean", "cls"])
    axis = parallel_axis(domains[RATE], [1e-4, None])
    assert axis["values"][0] == -4
    assert axis["values"][1] == axis["range"][0] < -5
