"""The real training command on tiny models, from the command line to the files that it leaves."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from raytrain_bert.config.load import load_config
from raytrain_bert.inference import Classifier
from tests.integration.conftest import OWN_TEXT, REVIEWS, TINY, TRAIN, PairRuns
from tests.integration.running import (
    Ended,
    checkpoints,
    metrics,
    run,
    state,
    strict_json,
    without_seconds,
)
from tests.reviews import LABELS, SIGNS, pairs, review, reviews, write_csv
from tests.tiny import tiny_bert

KEYS = (
    r"format|text|text\ pair|label|rows|labels|lengths|duplicates|run\ folder|devices|precision|parameters|batch|steps|"
    r"accuracy|macro\ F1|weighted\ F1|MCC|loss|best|trained\ on|time|speed"
)
DURATION = r"[\d.]+\ (s|min\ \d\d\ s)"
CALM_VIEW = re.compile(
    rf"""
    |                                                   # nothing
    | [a-zR0-9 ]+\ \.\.\.                               # a phase begins
    | [✓-]\ [a-zR0-9 ,]+\ \ {DURATION}                   # a phase has ended
    | ({KEYS})\ +\S.*                                   # a fact or a figure
    | epoch\ [\d.]+/\d+\ \ step\ .*                     # progress, or a validation
    | (interrupted\ and\ saved\ after\ step\ [\d,]+|finished)\ in\ {DURATION}
    | \ +(validation\ +)?test                           # head of the closing table
    | (use\ the\ model|go\ on\ with)
    | \ \ python\ -m\ raytrain_bert\.(predict|train)\ .*
    | going\ on\ after\ step\ [\d,]+
    | stopped\ early:\ .*
    | stopping\ after\ this\ step\ and\ saving;\ once\ more\ stops\ at\ once,\ without\ saving
    """,
    re.VERBOSE,
)

# Opens the model folder as a stranger would: transformers alone.
PLAIN_TRANSFORMERS = """
import csv, json, sys
import numpy as np, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, table, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
with open(table, encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file))
with torch.no_grad():
    batch = tokenizer([row["text"] for row in rows], truncation=True, padding=True, return_tensors="pt")
    logits = model(**batch).logits.numpy()
assert not [name for name in sys.modules if name.partition(".")[0] == "raytrain_bert"], sorted(sys.modules)
np.save(out, logits)
labels = [model.config.id2label[index] for index in logits.argmax(-1).tolist()]
right = sum(label == row["label"] for label, row in zip(labels, rows))
print(json.dumps({"accuracy": right / len(rows), "id2label": model.config.id2label,
                  "architecture": type(model).__name__}))
"""


# A run to the end


def test_screen_of_a_piped_run_is_the_calm_view_and_nothing_else(whole: Ended) -> None:
    assert whole.stderr == ""
    assert "\x1b" not in whole.stdout
    foreign = [line for line in whole.stdout.splitlines() if not CALM_VIEW.fullmatch(line)]
    assert foreign == []


def test_screen_tells_data_devices_epochs_and_scores_in_order(whole: Ended) -> None:
    lines = whole.stdout.splitlines()
    run_state = state(whole.run_folder)
    rows = run_state["rows"]
    steps = -(-rows["train"] // 4)
    expected = [
        r"looking at this machine \.\.\.",
        r"starting Ray \.\.\.",
        r"reading the data \.\.\.",
        r"tokenising \.\.\.",
        r"format +CSV, utf-8, comma, header",
        r"text +text",
        r"label +label",
        rf"rows +train {rows['train']}, validation {rows['validation']}, test 101",
        r"labels +3: bad \d+, good \d+, sport \d+",
        r"lengths +median \d+ tokens, longest \d+; cut at 128: .*",
        rf"run folder +{re.escape(str(whole.run_folder))}",
        r"starting 2 workers \.\.\.",
        r"devices +CPU, 2 workers, \d+ threads? each",
        r"precision +fp32",
        r"parameters +\S+, all trained",
        r"batch +4 rows a step over all workers",
        rf"steps +{2 * steps}, {steps} an epoch",
        rf"epoch 1/2  step 1/{2 * steps} .* tokens/s .*",
        rf"epoch 1/2  step {steps}  accuracy [01]\.\d{{4}} .*",
        rf"epoch 2/2  step {2 * steps}  accuracy [01]\.\d{{4}} .*",
        r"testing the best checkpoint \.\.\.",
        r"finished in .*",
        r" +validation +test",
        rf"accuracy +[01]\.\d{{4}} +{run_state['test']['accuracy']:.4f}",
        rf"macro F1 +[01]\.\d{{4}} +{run_state['test']['macro_f1']:.4f}",
        rf"rows +{rows['validation']}/{rows['validation']} +101/101",
        r"best +epoch \d/2, step \d+: validation accuracy [01]\.\d{4}",
        rf"trained on +{rows['train']}/{rows['train']} rows in each of 2 epochs, each once",
        r"time +start-up .*training .*",
        r"speed +.* rows/s, .* tokens/s in training",
        rf"run folder +{re.escape(str(whole.run_folder))}",
        r"use the model",
        r'  python -m raytrain_bert\.predict runs/whole --text "\.\.\."',
    ]
    where = 0
    for pattern in expected:
        found = next((n for n in range(where, len(lines)) if re.fullmatch(pattern, lines[n])), None)
        assert found is not None, f"{pattern!r} does not come after line {where}\n{whole.told()}"
        where = found + 1
    assert where == len(lines)


def test_no_process_is_left_after_a_run(whole: Ended) -> None:
    assert whole.left_over == ()


def test_run_folder_holds_what_was_run(whole: Ended, workshop: Path) -> None:
    config = load_config({}, whole.run_folder / "config.yaml")
    # Absolute, so that the run can be resumed from any folder.
    assert config.data.train == [str(workshop / "reviews.csv")]
    assert config.data.test == [str(workshop / "test.csv")]
    assert config.model.name == str(workshop / "tiny")
    assert (config.train.num_epochs, config.train.global_batch_size) == (2, 4)
    assert (config.optim.learning_rate, config.scaling.num_workers, config.output.name) == (2e-3, 2, "whole")
    run_state = state(whole.run_folder)
    assert run_state["status"] == "finished"
    assert run_state["command"] == ["raytrain-bert", "train", *whole.words[3:]]
    assert run_state["labels"] == list(LABELS)
    assert run_state["rows"]["train"] + run_state["rows"]["validation"] == 891
    assert run_state["rows"]["test"] == 101
    assert run_state["files"] == 2
    assert {"python", "torch", "ray", "transformers", "raytrain-bert"} <= set(run_state["versions"])
    assert run_state["git_commit"] is None  # the user's folder is no repository
    assert run_state["started"] < run_state["ended"]
    assert re.fullmatch(r"[0-9a-f]{32}", run_state["data_fingerprint"])
    assert run_state["stopped_early"] is False
    assert run_state["speed"]["rows_per_second"] > 0
    seconds = run_state["seconds"]
    assert 0 < seconds["training"] < seconds["total"] <= whole.seconds
    assert (whole.run_folder / "logs" / "ray.log").is_file()
    assert sorted(path.name for path in workshop.iterdir() if path.suffix == "") == [
        "commands", "experiments", "home", "runs", "tiny",
    ]  # fmt: skip


def test_metrics_count_every_row_once_an_epoch(whole: Ended) -> None:
    rows = state(whole.run_folder)["rows"]
    steps = metrics(whole.run_folder, "train")
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    for epoch in range(2):
        of_epoch = [record for record in steps if record["epoch"] == epoch]
        assert len(of_epoch) == -(-rows["train"] // 4)
        assert sum(record["rows"] for record in of_epoch) == rows["train"]
        assert all(0 < record["tokens"] <= record["padded_tokens"] for record in of_epoch)
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in steps)
    validations, tests = metrics(whole.run_folder, "validation"), metrics(whole.run_folder, "test")
    assert [record["epoch"] for record in validations] == [1.0, 2.0]
    assert len(tests) == 1
    for record, split in [*((record, "validation") for record in validations), (tests[0], "test")]:
        assert record["rows_seen"] == record["rows"] == rows[split]


def test_what_is_said_of_the_run_agrees_with_its_metrics(whole: Ended) -> None:
    run_state, validations = state(whole.run_folder), metrics(whole.run_folder, "validation")
    best = max(validations, key=lambda record: record["accuracy"])  # the first of equals
    assert run_state["best"] == {
        "epoch": best["epoch"], "step": best["step"], "metric": "accuracy", "score": best["accuracy"],
    }  # fmt: skip
    tested = metrics(whole.run_folder, "test")[0]
    assert {key: tested[key] for key in run_state["test"]} == run_state["test"]
    confusion = strict_json((whole.run_folder / "confusion.json").read_text(encoding="utf-8"))
    matrix = np.array(confusion["matrix"])
    assert confusion["labels"] == list(LABELS)
    assert matrix.sum() == 101
    assert matrix.trace() / matrix.sum() == run_state["test"]["accuracy"]
    assert run_state["step"] == metrics(whole.run_folder, "train")[-1]["step"]
    # Of two checkpoints, the last, the best, and one besides these two: none goes.
    assert checkpoints(whole.run_folder) == [record["step"] for record in validations]
    assert run_state["last_checkpoint"] == f"step-{run_state['step']:08d}"


@pytest.fixture(scope="module")
def stranger(whole: Ended, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain transformers in a fresh process makes of the model folder and the test file."""
    out = tmp_path_factory.mktemp("stranger") / "logits.npy"
    words = [str(whole.run_folder / "model"), str(whole.folder / "test.csv"), str(out)]
    ended = subprocess.run(
        [sys.executable, "-c", PLAIN_TRANSFORMERS, *words],
        cwd=out.parent,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout) | {"logits": np.load(out)}


def test_model_folder_opens_in_plain_transformers(stranger: dict[str, Any], whole: Ended) -> None:
    assert stranger["architecture"] == "BertForSequenceClassification"
    assert stranger["id2label"] == {"0": "bad", "1": "good", "2": "sport"}
    assert stranger["accuracy"] == state(whole.run_folder)["test"]["accuracy"]
    assert stranger["accuracy"] > 0.9  # by chance it would be a third


def test_classifier_gives_the_logits_of_plain_transformers(stranger: dict[str, Any], whole: Ended) -> None:
    texts = [row["text"] for row in reviews(101, seed=1)]
    logits = Classifier.load(whole.run_folder).logits(texts)
    np.testing.assert_allclose(logits, stranger["logits"], rtol=1e-4, atol=1e-5)


def test_model_folder_has_a_card(whole: Ended) -> None:
    card = (whole.run_folder / "model" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "pipeline_tag: text-classification" in card
    assert all(f"`{label}`" in card for label in LABELS)
    assert f"| accuracy | {state(whole.run_folder)['test']['accuracy']:.4f} |" in card


def test_a_used_run_folder_is_refused_before_anything_starts(whole: Ended) -> None:
    before = (whole.run_folder / "run.json").read_bytes()
    again = run(f"{REVIEWS} --output.name whole", whole.folder)
    assert again.returncode == 2
    assert again.stderr.startswith("run folder error: ")
    assert str(whole.run_folder) in again.stderr
    assert "--resume" in again.stderr
    assert "--overwrite" in again.stderr
    assert "starting Ray" not in again.stdout
    assert again.seconds < 15
    assert (whole.run_folder / "run.json").read_bytes() == before


# Ctrl-C, and on again


def test_ctrl_c_saves_and_tells_how_to_go_on(interrupted: Ended, saved_at: int) -> None:
    lines = interrupted.stdout.splitlines()
    assert interrupted.stderr == ""
    assert [line for line in lines if not CALM_VIEW.fullmatch(line)] == []
    assert any(line.startswith(f"interrupted and saved after step {saved_at:,} in ") for line in lines)
    assert lines[-2:] == ["go on with", "  python -m raytrain_bert.train --resume runs/interrupted"]
    assert interrupted.left_over == ()


def test_ctrl_c_stops_in_mid_epoch(interrupted: Ended, saved_at: int, resumed: Ended) -> None:
    # The same command without the interruption has 200 steps an epoch; the resumed one wrote the others.
    steps_per_epoch = len([r for r in metrics(resumed.run_folder, "train") if r["epoch"] == 0])
    assert 0 < saved_at < steps_per_epoch
    assert f"going on after step {saved_at:,}" in resumed.stdout.splitlines()


def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(whole: Ended, resumed: Ended) -> None:
    ours, theirs = (without_seconds(metrics(ended.run_folder)) for ended in (resumed, whole))
    assert [r["step"] for r in ours if r["kind"] == "train"] == [r["step"] for r in theirs if r["kind"] == "train"]
    assert ours == theirs
    our_state, their_state = state(resumed.run_folder), state(whole.run_folder)
    for key in ("status", "step", "best", "test", "rows", "labels", "data_fingerprint"):
        assert our_state[key] == their_state[key], key
    weights, expected = (load_file(ended.run_folder / "model" / "model.safetensors") for ended in (resumed, whole))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(weights[name], tensor), name


def test_screen_of_a_resumed_run_is_the_calm_view(resumed: Ended) -> None:
    assert resumed.stderr == ""
    assert [line for line in resumed.stdout.splitlines() if not CALM_VIEW.fullmatch(line)] == []
    assert resumed.left_over == ()


def test_a_finished_run_is_not_resumed_again(resumed: Ended) -> None:
    again = run(f"{TRAIN} --resume runs/interrupted", resumed.folder)
    assert again.returncode == 2
    assert "has finished" in again.stderr
    assert str(resumed.run_folder / "model") in again.stderr
    assert "starting Ray" not in again.stdout


# Any number of workers; pairs, a pooled head, early stopping, checkpoints


def test_training_in_this_process_gives_the_losses_of_two_workers(pair_runs: PairRuns) -> None:
    alone, two = pair_runs(0), pair_runs(2)
    assert re.search(r"^devices +CPU, 1 worker, \d+ threads?$", alone.stdout, re.MULTILINE)
    ours, theirs = (metrics(ended.run_folder, "train") for ended in (alone, two))
    assert len(ours) == len(theirs)
    for key in ("step", "epoch", "rows", "tokens", "learning_rate"):
        assert [r[key] for r in ours] == [r[key] for r in theirs], key
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-5)
    for kind in ("validation", "test"):
        for our, their in zip(metrics(alone.run_folder, kind), metrics(two.run_folder, kind), strict=True):
            assert our | {"kind": 0} == pytest.approx(their | {"kind": 0}, rel=1e-5)


def test_pairs_of_texts_are_found_and_shown(pair_runs: PairRuns) -> None:
    lines = pair_runs(0).stdout.splitlines()
    assert [line for line in lines if not CALM_VIEW.fullmatch(line)] == []
    assert pair_runs(0).stderr == ""
    where = lines.index("text          sentence1")
    assert lines[where + 1] == "text pair     sentence2"


def best_step(ended: Ended) -> int:
    """Step of the first of the best validations by accuracy."""
    validated = metrics(ended.run_folder, "validation")
    return int(max(validated, key=lambda record: record["accuracy"])["step"])


def test_early_stopping_ends_the_run_after_stale_validations(pair_runs: PairRuns) -> None:
    ended = pair_runs(0)
    validated = metrics(ended.run_folder, "validation")
    assert [record["step"] for record in validated] == [10, 20, 30, 40]
    assert metrics(ended.run_folder, "train")[-1]["step"] == 40
    run_state = state(ended.run_folder)
    assert run_state["stopped_early"] is True
    # The margin decides when to stop, not which checkpoint is the best.
    assert run_state["best"]["step"] == best_step(ended)
    assert "stopped early: accuracy has not been better for 3 validations" in ended.stdout.splitlines()


@pytest.mark.parametrize("workers", [0, 2])
def test_best_last_and_as_many_others_as_asked_for_are_kept(pair_runs: PairRuns, workers: int) -> None:
    ended = pair_runs(workers)
    saved, best, last = {*range(4, 41, 4), *range(10, 41, 10)}, best_step(ended), 40
    assert checkpoints(ended.run_folder) == sorted({best, last, max(saved - {best, last})})


def test_the_model_written_is_the_best_checkpoint(pair_runs: PairRuns) -> None:
    folder = pair_runs(0).run_folder
    written = load_file(folder / "model" / "model.safetensors")

    def weights(step: int) -> dict[str, Any]:
        (shard,) = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
        prefix = "model."
        return {k.removeprefix(prefix): v for k, v in load_file(shard).items() if k.startswith(prefix)}

    assert best_step(pair_runs(0)) < 40  # else this test shows nothing
    best, last = weights(best_step(pair_runs(0))), weights(40)
    assert set(written) <= set(best)
    assert all(np.array_equal(best[name], tensor) for name, tensor in written.items())
    assert any(not np.array_equal(last[name], tensor) for name, tensor in written.items())


def test_quiet_prints_the_closing_table_only(pair_runs: PairRuns) -> None:
    quiet, loud = pair_runs(2), pair_runs(0)
    lines = quiet.stdout.splitlines()
    assert quiet.stderr == ""
    assert lines[0].startswith("finished in ")
    expected = loud.stdout.splitlines()
    expected = expected[next(n for n, line in enumerate(expected) if line.startswith("finished in ")) :]
    assert [line.split(" ")[0] for line in lines] == [line.split(" ")[0] for line in expected]
    assert quiet.left_over == ()


def test_predict_takes_pairs(pair_runs: PairRuns) -> None:
    rows = pairs(2, seed=7)
    words = [word for row in rows for word in ("--text", row["sentence1"], "--text-pair", row["sentence2"])]
    ended = run(f"python -m raytrain_bert.predict runs/workers-0 {shlex.join(words)}", pair_runs(0).folder)
    assert ended.returncode == 0, ended.told()
    told = [strict_json(line) for line in ended.stdout.splitlines()]
    classifier = Classifier.load(pair_runs(0).run_folder)
    expected = classifier.predict([row["sentence1"] for row in rows], [row["sentence2"] for row in rows])
    assert [line["text"] for line in told] == [row["sentence1"] for row in rows]
    assert [line["label"] for line in told] == [prediction.label for prediction in expected]
    assert [line["probability"] for line in told] == pytest.approx([p.probability for p in expected], abs=1e-4)


def test_predict_reads_a_text_a_line_from_standard_input(whole: Ended) -> None:
    texts = {"good great fine happy film": "good", "awful poor sad book": "bad", "team game match goal": "sport"}
    ended = run("python -m raytrain_bert.predict runs/whole", whole.folder, stdin="\n".join(texts) + "\n")
    assert ended.returncode == 0, ended.told()
    assert ended.stderr == ""
    told = [strict_json(line) for line in ended.stdout.splitlines()]
    assert {line["text"]: line["label"] for line in told} == texts
    assert all(1 / 3 < line["probability"] <= 1 for line in told)


# What goes wrong


def test_gpus_that_are_not_there_are_refused_at_once(workshop: Path) -> None:
    settings = "--scaling.num-workers 2 --scaling.use-gpu --output.storage-path elsewhere"
    ended = run(f"{OWN_TEXT} {TINY} {settings}", workshop)
    assert ended.returncode == 2
    assert ended.seconds < 15
    assert ended.stderr.startswith("resource error: 2 workers with a GPU each were asked for; this machine has 0 GPUs")
    assert "--no-scaling.use-gpu" in ended.stderr
    assert "starting Ray" not in ended.stdout
    assert not list((workshop / "elsewhere").glob("*"))
    assert ended.left_over == ()


def test_all_problems_of_a_configuration_are_told_at_once(workshop: Path) -> None:
    wrong = "--train.num-epochs 0 --optim.lerning-rate 1 --data.max-length 3 --model.pooling median"
    ended = run(f"{OWN_TEXT} {wrong} --output.storage-path elsewhere", workshop)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("configuration error: 4 problems:")
    for part in ("train.num_epochs", "did you mean --optim.learning-rate", "data.max_length", "model.pooling"):
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (workshop / "elsewhere").exists()


def test_bad_rows_are_told_with_file_and_row_and_leave_no_run_folder(workshop: Path, tmp_path: Path) -> None:
    rows = reviews(40, seed=2)
    rows[6]["text"], rows[11]["label"] = "", ""
    (tmp_path / "tiny").symlink_to(workshop / "tiny")
    write_csv(tmp_path / "reviews.csv", rows)
    ended = run(f"{OWN_TEXT} {TINY}", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("data error: ") == 1
    assert "Traceback" not in ended.stderr
    assert "1 of 40 rows have no text" in ended.stderr
    assert "1 of 40 rows have no label" in ended.stderr
    for row in (7, 12):
        assert re.search(rf"reviews\.csv.*\brow {row}\b", ended.stderr), ended.stderr
    assert "--data.bad-rows skip" in ended.stderr
    assert not list((tmp_path / "runs").glob("*"))
    assert ended.left_over == ()


def test_a_fault_ends_with_code_1_and_keeps_its_traceback(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").symlink_to(workshop / "reviews.csv")
    tiny_bert(tmp_path / "tiny", vocab_size=20)  # the tokenizer knows more words than the model has embeddings
    ended = run(f"{OWN_TEXT} {TINY} --scaling.num-workers 0 --scaling.cpus-per-worker 1 --output.name fault", tmp_path)
    assert ended.returncode == 1, ended.told()
    run_folder = tmp_path / "runs" / "fault"
    error = run_folder / "logs" / "error.txt"
    told = ended.stderr.splitlines()
    assert told[0] == "fault: IndexError: index out of range in self"
    assert re.fullmatch(
        r"  worker 0 \(.+, process \d+\), step 1; rows of the batch: (reviews\.csv row \d+(, )?){4}", told[1]
    )
    assert told[2] == f"  The traceback is in {error}."
    assert len(told) == 3
    kept = error.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in kept
    assert "IndexError: index out of range in self" in kept
    assert state(run_folder)["status"] == "failed"
    assert ended.left_over == ()


def test_reviews_can_be_told_apart_by_their_signs() -> None:
    """The oracle of the accuracies above: a text holds signs of its own label only."""
    rng = random.Random(3)
    for label in LABELS:
        words = set(re.findall(r"[a-z]+", review(label, rng)))
        assert [name for name in LABELS if words & set(SIGNS[name])] == [label]
