"""What the driver makes of the workers' events: metrics.jsonl, run.json, the screen, and a word when nothing comes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytrain_bert.progress.board import DriverBoard
from raytrain_bert.progress.events import to_json_line
from raytrain_bert.progress.screen import Screen
from raytrain_bert.pulse import who_lags
from raytrain_bert.run_folder import RunFolder
from raytrain_bert.trackers import Listener

SECONDS_OF_SILENCE = 30.0
"""After so long without news, the user is told what is waited for."""
SECONDS_BETWEEN_QUESTIONS = 5.0
LARGEST_DIFFERENCE = 1e-4
"""Relative; a repeated step whose loss or gradient norm differs by more is worth a warning."""
FIGURES = ("loss", "grad_norm")


class Repeats:
    """Steps that are trained again after a loss of workers: the same figures must come out."""

    def __init__(self) -> None:
        """Nothing repeated yet."""
        self._before: dict[int, tuple[int | None, dict[str, Any]]] = {}
        self.steps = self.equal = 0
        self.largest_difference = 0.0

    def expect(self, dropped: list[dict[str, Any]], world_size: int | None) -> None:
        """These records were dropped; `world_size` workers had made them."""
        self._before |= {record["step"]: (world_size, record) for record in dropped if record["kind"] == "train"}

    def compare(self, records: list[dict[str, Any]], world_size: int | None) -> None:
        """Look at the same steps again."""
        for record in records:
            workers, before = self._before.pop(record["step"], (None, None))
            if before is None:
                continue
            self.steps += 1
            difference = max(_difference(record[key], before[key]) for key in FIGURES)
            self.equal += difference == 0
            if workers == world_size:  # with another number of workers, dropout's masks are others
                self.largest_difference = max(self.largest_difference, difference)

    def fields(self) -> dict[str, Any]:
        """For run.json."""
        return {"steps": self.steps, "equal": self.equal, "largest_difference": self.largest_difference}


def _difference(new: float | None, old: float | None) -> float:
    """Relative difference; what is not finite equals what is not finite."""
    a, b = (math.nan if value is None else value for value in (new, old))
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b) / max(abs(b), 1e-12)


class Watch:
    """Events from the workers: to the screen, to the run folder, and the time each part takes."""

    def __init__(self, screen: Screen, folder: RunFolder, started: float, listeners: Sequence[Listener] = ()) -> None:
        """`started` is time.monotonic() at the start of the program; `listeners` are told every event too."""
        self.screen, self.folder, self.listeners = screen, folder, listeners
        self.started = self.last_news = self.last_look = time.monotonic()
        self.started = started
        self.ready = False
        self.world_size: int | None = None
        """Of the workers that train now; None before they are known."""
        self.processes: dict[int, int] = {}
        """Process of each rank that trains now."""
        self.lag: str | None = None
        """Who the others wait for, as far as is known."""
        self.seconds = {"start-up": 0.0, "training": 0.0, "validation": 0.0, "checkpoints": 0.0, "test": 0.0}
        self.rows = self.tokens = self.padded_tokens = 0
        self.receipts: list[dict[str, Any]] = list(folder.state().get("receipts", []))
        self.restarts: list[dict[str, Any]] = list(folder.state().get("restarts", []))
        self.repeats = Repeats()
        self._lost: tuple[float, dict[str, str]] | None = None
        self._last_step = folder.last_recorded_step()
        self._attempts = 0
        self._first_step_noted = False
        self._restart_under_way: dict[str, Any] | None = None
        self._lag_told: str | None = None

    def take(self, board: DriverBoard) -> None:
        """Deal with what has been posted since the last call."""
        events = board.take()
        for event in events:
            self.note(event)
            for listener in self.listeners:
                listener.take(event)
            self.screen.handle(event)
        if any(event["event"] == "steps" for event in events):
            self.lag = self._lag_told = None
        if events:
            self.last_news = time.monotonic()
        else:
            self.break_the_silence(board)

    def break_the_silence(self, board: DriverBoard) -> None:
        """Say what is waited for, when nothing has come for a while."""
        now = time.monotonic()
        if now - self.last_look < SECONDS_BETWEEN_QUESTIONS or now - self.last_news < SECONDS_BETWEEN_QUESTIONS:
            return
        self.last_look = now
        if self.ready:
            self.ask_who_lags(board)
        if now - self.last_news < SECONDS_OF_SILENCE:
            return
        if not self.ready:
            self.last_news = now
            if text := waiting_for_resources():
                self.screen.note(text)
        elif self.lag is not None and self._lag_told is None:
            self._lag_told = self.lag
            self.screen.warning(f"no news for {now - self.last_news:.0f} s: {self.lag}")

    def ask_who_lags(self, board: DriverBoard) -> None:
        """Look at the workers' signs of life; what was known stays where they tell nothing."""
        # Ranks that are gone have left their last signs.
        living = {rank: sign for rank, sign in board.signs().items() if sign["pid"] == self.processes.get(rank)}
        self.lag = who_lags(living, SECONDS_BETWEEN_QUESTIONS) or self.lag

    def note(self, event: dict[str, Any]) -> None:
        """Keep count, and write down what is worth it."""
        kind, seconds = event["event"], event.get("seconds", 0.0)
        if kind == "ready":
            if not self.ready and not self._attempts:
                self.seconds["start-up"] = time.monotonic() - self.started
            self.ready = True
            if "workers" in event:
                self.folder.update(workers=event["workers"])
                self.folder.update(effective=event.get("effective"))
                self.processes = {worker["rank"]: worker["pid"] for worker in event["workers"]}
        elif kind == "started":
            self.note_start(event)
        elif kind == "phase":
            self.ready = self.ready and not event.get("is_start", False)
        elif kind == "lost":
            self.ready = False
            self._lost = self._lost or (time.monotonic(), event["reasons"])
        elif kind == "steps":
            self.seconds["training"] += seconds
            self.rows += sum(record["rows"] for record in event["records"])
            self.tokens += sum(record["tokens"] for record in event["records"])
            self.padded_tokens += sum(record["padded_tokens"] for record in event["records"])
            self._last_step = event["records"][-1]["step"]
            self.repeats.compare(event["records"], self.world_size)
            self.note_first_step()
        elif kind in ("validation", "test"):
            self.seconds[kind] += seconds
        elif kind == "checkpoint":
            self.seconds["checkpoints"] += seconds
            self.folder.update(last_checkpoint=Path(event["path"]).name)
        elif kind == "epoch":
            kept = [receipt for receipt in self.receipts if receipt["step"] < event["step"]]
            self.receipts = [*kept, {key: value for key, value in event.items() if key != "event"}]
            self.folder.update(receipts=self.receipts)
        lines = [to_json_line(line) for line in metric_lines(event)]
        if lines:
            self.folder.append_metrics(lines)

    def note_start(self, event: dict[str, Any]) -> None:
        """Workers begin or go on: what was written after their checkpoint will be written again."""
        step, workers = event["step"], event.get("world_size")
        before = self.world_size if self._attempts else event.get("world_size_before")
        last_step = self._last_step
        self.repeats.expect(self.folder.cut_metrics(step), before)
        self.receipts = [receipt for receipt in self.receipts if receipt["step"] <= step]
        if self._attempts:
            self._restart_under_way = {
                "after_step": step,
                "steps_to_repeat": max(0, last_step - step),
                "workers": workers,
                "workers_before": before,
                "reasons": self._lost[1] if self._lost else {},
                "seconds": None,
            }
            self.restarts.append(self._restart_under_way)
            self.folder.update(restarts=self.restarts)
            # What is gone on after is said by the screen; here, what it costs.
            if self._restart_under_way["steps_to_repeat"]:
                self.screen.note(f"{self._restart_under_way['steps_to_repeat']:,} steps are trained again")
        self._attempts += 1
        self._first_step_noted = False
        self._last_step, self.world_size, self.ready = step, workers, True

    def note_first_step(self) -> None:
        """The first step of these workers: the time that a restart cost is known."""
        if self._first_step_noted:
            return
        self._first_step_noted = True
        self.folder.update(training_since=time.time())
        if self._restart_under_way is not None:
            if self._lost is not None:
                self._restart_under_way["seconds"] = round(time.monotonic() - self._lost[0], 1)
            self._restart_under_way = self._lost = None
            self.folder.update(restarts=self.restarts)

    def close(self) -> None:
        """The workers are done: write down what was repeated, and warn where it came out otherwise."""
        if self.repeats.steps:
            self.folder.update(repeated=self.repeats.fields())
        if self.repeats.largest_difference > LARGEST_DIFFERENCE:
            self.screen.warning(
                f"of {self.repeats.steps:,} steps that were trained again, {self.repeats.steps - self.repeats.equal:,} "
                f"came out otherwise (by up to {self.repeats.largest_difference:.1e} of loss or gradient norm): the "
                "kernels of this device are not deterministic. --train.deterministic makes them so."
            )

    def split_of_time(self) -> dict[str, float]:
        """Wall time in seconds, by part and in all."""
        parts = {name: round(value, 2) for name, value in self.seconds.items()}
        return parts | {"total": round(time.monotonic() - self.started, 2)}

    def speed(self) -> dict[str, float | None]:
        """Rows and real tokens a second of training time, and the share of padding."""
        seconds = self.seconds["training"]
        return {
            "rows_per_second": round(self.rows / seconds, 2) if seconds else None,
            "tokens_per_second": round(self.tokens / seconds, 1) if seconds else None,
            "padding": round(1 - self.tokens / self.padded_tokens, 4) if self.padded_tokens else None,
        }


def waiting_for_resources() -> str | None:
    """What the workers wait for; None when they have their places and are only loading."""
    import ray
    from ray.util import placement_group_table

    asked = [group for group in placement_group_table().values() if group["state"] == "PENDING"]
    if not asked:
        return None
    bundles = [bundle for group in asked for bundle in group["bundles"].values()]
    wanted = " + ".join(", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
    free, total = ray.available_resources(), ray.cluster_resources()
    there = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return (
        f"waiting for room for the workers ({wanted}); free: {there}. "
        "Other jobs hold the rest: wait for them, or lower --scaling.num-workers."
    )


def metric_lines(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What of an event goes to metrics.jsonl: one flat record per step, validation, test and epoch."""
    kind = event["event"]
    if kind == "steps":
        return [{"kind": "train", **record} for record in event["records"]]
    if kind in ("validation", "test"):
        return [{"kind": kind, "step": event["step"], "epoch": event["epoch"], **event["scores"]}]
    if kind == "epoch":
        return [{"kind": kind, **{key: value for key, value in event.items() if key != "event"}}]
    return []
