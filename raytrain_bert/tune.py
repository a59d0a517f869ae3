"""Search settings: `python -m raytrain_bert.tune`."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_bert import command, runtime
from raytrain_bert.config.errors import ConfigError, DataError, RunFolderError, TrainingError, UserError
from raytrain_bert.config.load import dump_yaml, load_config, with_absolute_paths
from raytrain_bert.config.schema import OutputConfig
from raytrain_bert.config.sweep import SweepConfig
from raytrain_bert.driver import stop_at_sigterm
from raytrain_bert.progress.format import SCORES, score
from raytrain_bert.progress.streams import Streams, captured_streams
from raytrain_bert.run import data_name, load_text_side, prepare, start
from raytrain_bert.run_folder import now, provenance, refuse_running
from raytrain_bert.sweep.finalize import Winner
from raytrain_bert.sweep.page import FINISHING, Page
from raytrain_bert.sweep.records import SweepFolder, Trial
from raytrain_bert.sweep.resources import TrialPlan, plan_trials
from raytrain_bert.sweep.screen import Now, SweepScreen, sample_told
from raytrain_bert.sweep.space import Space, parse_domain, read_space, token_variants, with_sample
from raytrain_bert.sweep.state import SweepState
from raytrain_bert.trackers import check_trackers

if TYPE_CHECKING:
    from raytrain_bert.sweep.trial import Shared, Tokens

DESCRIPTION = (
    "Search learning rates, and any other settings, with Ray Tune: each trial is a training run. Searched settings are "
    "given in the file (search: {optim.learning-rate: {loguniform: [1e-5, 5e-4]}}) or as flags "
    "(--search.optim.learning-rate loguniform:1e-5,5e-4; kinds: uniform, loguniform, quniform, qloguniform, randint, "
    "choice, grid). Without any: learning rate, warmup, layer decay and batch size. --resume SWEEP goes on."
)
RESUMABLE_SECTIONS = ("scaling", "sweep")
FIXED_ON_RESUME = ("sweep.algorithm", "sweep.seed", "sweep.scheduler", "sweep.unit")
SEARCH_FLAG = "--search."
FEWEST_TOLD = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry; gives the exit code."""
    started = time.monotonic()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        rest, searched = split_search_flags(words)
        call = command.parse_command("tune", DESCRIPTION, rest, root=SweepConfig, resumable=RESUMABLE_SECTIONS)
        if call.auto_resume and call.resume is not None:
            refuse_another(call.config, searched, Path(call.resume))
            searched = {}
        else:
            refuse_changes(rest, resumed=call.resume is not None)
        config = with_search(call.config, searched, resumed=call.resume is not None)
        space = read_space(config.search, config.base())
        token_variants(space)
    except UserError as error:
        command.print_error(error.title, str(error))
        return command.USER_ERROR
    if call.print_config:
        print(dump_yaml(config), end="")
        return command.DONE
    folder: SweepFolder | None = None
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        streams = stack.enter_context(captured_streams(None if call.verbose else Path(scratch) / "ray.log"))
        screen = SweepScreen(
            streams.stdout, errors=streams.stderr, quiet=call.quiet, verbose=call.verbose, started=started
        )
        stack.callback(screen.close)
        stack.enter_context(runtime.own_ray())

        def body() -> int:
            nonlocal folder
            given, resumed = with_absolute_paths(config), call.resume is not None
            if call.resume is not None:
                if call.auto_resume and has_finished(SweepFolder(Path(call.resume)), given):
                    screen.note(f"the sweep in {call.resume} has finished already")
                    return command.DONE
                folder = to_resume(call.resume, given)
            else:
                name = given.output.name or f"{data_name(given)}-sweep-{datetime.now():%Y%m%d-%H%M%S}"
                folder = for_new_sweep(given.output.storage_path, name, overwrite=call.overwrite)
            sweep = Sweep(given, space, folder, screen, started=started, resumed=resumed)
            return sweep.run(streams, words, dry_run=call.dry_run)

        def error_path() -> Path | None:
            return folder.error_path if folder is not None and folder.path.is_dir() else None

        return command.guard(body, screen.error, error_path)


def split_search_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take --search.SETTING KIND:ARGUMENT,... out of a command line; gives the rest, and a domain by dotted key.

    Raises:
        ConfigError: a flag is not understood.
    """
    rest: list[str] = []
    searched: dict[str, Any] = {}
    problems: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith(SEARCH_FLAG):
            rest.append(word)
            continue
        flag, equals, value = word.partition("=")
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else ""
        key = flag[len(SEARCH_FLAG) :].replace("-", "_")
        try:
            searched[key] = None if value == "none" else parse_domain(value)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
    if problems:
        raise ConfigError.from_problems(problems)
    return rest, searched


def with_search(config: SweepConfig, searched: Mapping[str, Any], *, resumed: bool) -> SweepConfig:
    """The configuration with the search space of file and flags together; a flag of none takes a setting out."""
    if resumed and searched:
        raise ConfigError("--search: a resumed sweep keeps its search space.")
    search = {str(key).replace("-", "_"): domain for key, domain in config.search.items()} | dict(searched)
    return config.model_copy(update={"search": {key: domain for key, domain in search.items() if domain is not None}})


def refuse_changes(words: Sequence[str], *, resumed: bool) -> None:
    """A resumed sweep keeps what decides its samples.

    Raises:
        ConfigError: names what would change.
    """
    given = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    fixed = [f"--{key.replace('_', '-')}" for key in given if key in FIXED_ON_RESUME]
    if resumed and fixed:
        raise ConfigError(f"{', '.join(fixed)}: a resumed sweep keeps its samples and how they are judged.")


def refuse_another(config: SweepConfig, searched: Mapping[str, Any], folder: Path) -> None:
    """The sweep that is gone on with by --auto-resume must be the one that is asked for.

    Raises:
        ConfigError: its samples, or how they are judged, were others.
    """
    before = load_config({}, folder / "config.yaml", root=SweepConfig)
    names = [key.partition(".")[2] for key in FIXED_ON_RESUME]
    changed = [f"sweep.{name}" for name in names if getattr(before.sweep, name) != getattr(config.sweep, name)]
    asked = {domain.key: domain for domain in read_space({**before.search, **searched}, config.base()).domains}
    changed += [d.key for d in read_space(before.search, config.base()).domains if asked.pop(d.key, None) != d]
    if changed or asked:
        raise ConfigError(
            f"--auto-resume: the sweep in {folder} was begun with another {', '.join([*changed, *asked])}."
        )


def has_finished(folder: SweepFolder, config: SweepConfig) -> bool:
    """Whether there is nothing left to do for a sweep, unless its budget has grown."""
    before = load_config({}, folder.config_path, root=SweepConfig).sweep
    return folder.state.read().get("status") == "finished" and not config.sweep.allows_more_than(before)


def for_new_sweep(storage_path: str, name: str, *, overwrite: bool) -> SweepFolder:
    """The folder of a new sweep, not made yet.

    Raises:
        RunFolderError: it is used.
    """
    if "://" in storage_path:
        raise ConfigError(f"output.storage_path {storage_path}: give a local or shared folder, not a URI.")
    if Path(name).name != name or name == "..":
        raise ConfigError(f"output.name {name!r}: a plain name is needed; the folder goes to output.storage_path.")
    folder = SweepFolder(Path(storage_path).expanduser().resolve() / name)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        ours = folder.state.path.is_file()
        if not (ours and overwrite):
            raise RunFolderError(
                f"{folder.path} is used. Go on with --resume {folder.path}, start anew with --overwrite, or choose "
                "another --output.name."
                if ours
                else f"{folder.path} holds something that is no sweep. Choose another --output.name."
            )
        refuse_running(folder.path, folder.state.read())
        shutil.rmtree(folder.path)
    return folder


def to_resume(path: str, config: SweepConfig) -> SweepFolder:
    """The folder of a sweep that is to go on, wherever it lies now; a finished one where it is to have more trials.

    Raises:
        RunFolderError: it is no sweep, or one that has finished or is still running.
    """
    folder = SweepFolder(Path(path).expanduser().resolve())
    if not folder.state.path.is_file() or not folder.config_path.is_file():
        raise RunFolderError(f"{folder.path} is no sweep (config.yaml and sweep.json are not there).")
    state = folder.state.read()
    if state.get("status") == "finished":
        if config.sweep.scheduler == "pbt":
            raise RunFolderError(
                f"The sweep in {folder.path} has finished, and a population (pbt) cannot grow. Begin a new sweep."
            )
        before = load_config({}, folder.config_path, root=SweepConfig).sweep
        if not config.sweep.allows_more_than(before):
            raise RunFolderError(
                f"The sweep in {folder.path} has finished; its results are in {folder.csv_path}. For more trials: "
                f"--resume {folder.path} --sweep.num-trials N, with N above {before.num_trials or state.get('trials')}."
            )
    refuse_running(folder.path, state)
    return folder


class Sweep:
    """One sweep, from files to the model of the winner."""

    def __init__(
        self,
        config: SweepConfig,
        space: Space,
        folder: SweepFolder,
        screen: SweepScreen,
        *,
        started: float,
        resumed: bool,
    ) -> None:
        """Nothing starts yet."""
        self.config, self.space, self.folder, self.screen = config, space, folder, screen
        self.started, self.resumed = started, resumed
        self.base = config.base()
        self.metric = config.train.best_metric
        self.page = Page(folder, space, folder.path.name)

    def run(self, streams: Streams, words: Sequence[str], *, dry_run: bool = False) -> int:
        """Search, then finish the winner; gives the exit code. A dry run ends before the first trial."""
        screen, scaling = self.screen, self.config.scaling
        screen.phase("looking at this machine")
        runtime.set_environment()
        node = runtime.local_node()
        local = runtime.cluster_address(scaling) is None
        from raytrain_bert.sweep.search import algorithm_of, planned

        algorithm = algorithm_of(self.config.sweep, self.space)
        samples = planned(self.config.sweep, self.space, self.base)
        total = len(samples) if samples is not None else self.config.sweep.num_trials
        if self.resumed and samples is not None and self.folder.state.read().get("status") == "finished":
            refuse_tried(self.folder, len(samples))
        if local:  # refused before anything is started
            plan_trials(scaling, self.config.sweep, [node], total)
        check_trackers(self.config.output.trackers or ())
        runtime.check_dashboard(self.config.scaling)
        attempt = provenance(["raytrain-bert", "tune", *words])
        self.open_folder(attempt)
        streams.redirect_to(self.folder.log_path)
        try:
            tokens, dashboard, facts = self.tokenise(node)
            stop_at_sigterm()
            plan = plan_trials(scaling, self.config.sweep, [node] if local else runtime.cluster_nodes(), total)
            state = SweepState(self.folder, self.space.keys, self.metric, gpus=plan.gpus)
            self.check_data(tokens)
        except BaseException as error:
            user = isinstance(error, (UserError, KeyboardInterrupt))
            if user and not self.resumed:
                shutil.rmtree(self.folder.path, ignore_errors=True)
            else:
                self.folder.state.update(status="interrupted" if user else "failed", ended=now())
            raise
        self.show_facts(facts, plan, algorithm, total, dashboard)
        if dry_run:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            self.screen.note("nothing was trained and nothing is left of it: a dry run")
            return command.DONE
        if self.resumed:
            self.screen.note(kept_told(state.trials()))
        from raytrain_bert.sweep.trial import Shared

        shared = Shared(str(self.folder.path), self.base, tokens, plan.workers)
        try:
            stopped = self.search(shared, plan, state)
            if stopped is not None:
                return self.close_interrupted(state, total, stopped)
            if algorithm != "grid":
                self.tell_exhausted(state)
            return self.close(shared, plan, state, total)
        except BaseException as error:
            stopped_at_once = isinstance(error, KeyboardInterrupt)
            self.folder.state.update(status="interrupted" if stopped_at_once else "failed", ended=now())
            raise

    def open_folder(self, attempt: dict[str, Any]) -> None:
        """Make the folder, or note that the sweep goes on."""
        state = self.folder.state
        if self.resumed:
            earlier = state.read().get("resumed", [])
            fields = {"host": attempt["host"], "pid": attempt["pid"], "resumed": [*earlier, attempt]}
            state.update(status="running", **fields)
        else:
            self.folder.log_path.parent.mkdir(parents=True)
            state.update(status="running", **attempt)
        # The file holds a search space that was given by flags or is the default one, too.
        search = {
            domain.key: {domain.kind: list(domain.arguments)} | ({"when": dict(domain.when)} if domain.when else {})
            for domain in self.space.domains
        }
        written = self.config.model_copy(update={"search": search})
        self.folder.config_path.write_text(dump_yaml(written), encoding="utf-8")

    def tokenise(self, node: Any) -> tuple[tuple[Tokens, ...], str | None, tuple[tuple[str, str], ...]]:
        """Read and tokenise once for each choice of what decides the tokens; Ray is up afterwards."""
        from raytrain_bert.sweep.trial import Tokens

        found: list[Tokens] = []
        dashboard: str | None = None
        facts: tuple[tuple[str, str], ...] = ()
        for choice in token_variants(self.space):
            config = with_sample(self.base, choice)
            if not found:
                tokenizer, longest, dashboard = start(config, node, self.screen, f"sweep {self.folder.path.name}")
            else:
                tokenizer, longest = load_text_side(config)
            data = prepare(config, tokenizer, longest, self.screen)
            for warning in data.warnings if not found else ():
                self.screen.warning(warning)
            facts = facts or data.facts
            found.append(Tokens(choice, data, longest))
        return tuple(found), dashboard, facts

    def check_data(self, tokens: Sequence[Tokens]) -> None:
        """A sweep that goes on must find the rows that it began with."""
        fingerprints = [item.data.fingerprint for item in tokens]
        before = self.folder.state.read().get("data_fingerprints")
        if before is not None and before != fingerprints:
            raise DataError(f"The data has changed since the sweep in {self.folder.path} began; it cannot go on.")
        self.folder.state.update(data_fingerprints=fingerprints, rows=tokens[0].data.num_rows)

    def show_facts(
        self,
        facts: Sequence[tuple[str, str]],
        plan: TrialPlan,
        algorithm: str,
        total: int | None,
        dashboard: str | None,
    ) -> None:
        """What is searched, how, and where."""
        settings = self.config.sweep
        budget = [
            f"{total} trials" if total is not None else "",
            f"{settings.minutes:g} minutes" if settings.minutes is not None else "",
            f"{settings.gpu_minutes:g} GPU minutes" if settings.gpu_minutes is not None else "",
        ]
        ended = (
            f", {settings.scheduler} from {settings.grace:g} {settings.unit}" if settings.scheduler != "none" else ""
        )
        rows = [
            *facts,
            ("searching", f"{algorithm}, {', at most '.join(part for part in budget if part)}{ended}"),
            *(("" if n else "settings", f"{key}: {told}") for n, (key, told) in enumerate(self.space.told())),
            ("trials", plan.told()),
            *command.dashboard_row(dashboard),
            ("sweep", str(self.folder.path)),
        ]
        self.screen.facts(rows)
        self.screen.unit = settings.unit
        if settings.scheduler == "pbt" and total is not None and plan.concurrent < total:
            self.screen.warning(
                f"pbt with {total} trials and room for {plan.concurrent} at a time: they take turns, and each turn "
                "starts its training anew from its checkpoint. Lower --sweep.num-trials or the resources of a trial."
            )

    def search(self, shared: Shared, plan: TrialPlan, state: SweepState) -> str | None:
        """Run the trials that are left; gives the signal that stopped them."""
        from raytrain_bert.sweep.driver import Search, search

        before = float(self.folder.state.read().get("search_seconds", 0.0))
        job = Search(
            self.folder,
            self.config.sweep,
            self.space,
            shared,
            plan,
            state,
            self.screen,
            self.folder.path.name,
            self.page,
            before,
        )
        began = time.monotonic()
        try:
            return search(job)
        finally:
            self.folder.state.update(search_seconds=round(before + time.monotonic() - began, 1))

    def tell_exhausted(self, state: SweepState) -> None:
        """Say so where the space has fewer samples than trials were asked for."""
        wanted, tried = self.config.sweep.num_trials, len(state.trials())
        if wanted is not None and tried < wanted and state.stopping is None:
            self.screen.note(f"{tried} trials in place of {wanted}: the search space has no other samples")

    def close_interrupted(self, state: SweepState, total: int | None, signal_name: str) -> int:
        """Say how to go on; gives the exit code."""
        self.folder.state.update(status="interrupted", ended=now(), signal=signal_name)
        self.page.update(self.where(state, total), status="interrupted", always=True)
        self.screen.results(self.where(state, total))
        self.screen.last_rows(
            "interrupted and saved", [("sweep", str(self.folder.path))],
            "go on with", command.resume_command("tune", shlex.quote(str(self.folder.path))),
        )  # fmt: skip
        return command.INTERRUPTED

    def close(self, shared: Shared, plan: TrialPlan, state: SweepState, total: int | None) -> int:
        """Finish the winner and show the results; gives the exit code."""
        best = state.best()
        if best is None:
            raise TrainingError(no_winner(state.trials(), self.metric))
        self.write_best(best, plan)
        self.page.update(self.where(state, total), status=FINISHING, always=True)
        self.folder.state.update(best=best_fields(best, self.metric, best.path))
        final = Winner(self.config, self.folder, self.screen, shared, plan, state, best).finalize()
        self.folder.state.update(
            status="finished", ended=now(), trials=len(state.trials()), final=final.fields(self.folder)
        )
        where = self.where(state, total)
        self.page.update(where, status="finished", always=True, test=final.test)
        self.screen.results(where)
        rows = [
            ("best", f"trial {best.number}, {sample_told(best.sample)}"),
            ("validation", f"{SCORES[self.metric]} {score(best.best_score)} at {self.moment_of(best)}"),
        ]
        if final.kind != "trial":
            told = f"{SCORES[self.metric]} {score(final.validation)} on validation"
            if final.validation is None:
                told = "on training and validation rows, so without a validation score"
            rows.append((final.kind, told))
        if final.test:
            rows.append(("test", ", ".join(f"{name} {score(final.test.get(key))}" for key, name in SCORES.items())))
        rows += [
            ("settings", str(self.folder.best_path)),
            ("table", str(self.folder.csv_path)),
            ("page", str(self.folder.page_path)),
            ("model", str(final.run.model_path)),
        ]
        self.screen.last_rows(
            "finished",
            rows,
            "use the model",
            f'python -m raytrain_bert.predict {shlex.quote(str(final.run.path))} --text "..."',
        )
        return command.DONE

    def where(self, state: SweepState, total: int | None) -> Now:
        """Where the search stands, for the table."""
        seconds = time.monotonic() - self.started
        return Now(state.trials(), self.space.keys, self.metric, total, seconds, None, self.config.sweep.unit)

    def moment_of(self, best: Trial) -> str:
        """When it was best, in the unit of the sweep."""
        unit = self.config.sweep.unit
        return f"{'step' if unit == 'steps' else 'epoch'} {best.best_at(unit):.6g}"

    def write_best(self, best: Trial, plan: TrialPlan) -> None:
        """Write the winner's settings as an experiment that `train --config` takes and that gives its score."""
        config = with_sample(self.base, best.sample)
        scaling = config.scaling.model_copy(
            update={"num_workers": max(plan.workers.num_workers, 1), "cpus_per_worker": plan.workers.cpus_per_worker}
        )
        # The folder of a run that is made with it is a matter of its own.
        config = config.model_copy(update={"scaling": scaling, "output": OutputConfig()})
        told = f"{self.metric} {score(best.best_score)} on validation at {self.moment_of(best)}"
        head = (
            f"# Trial {best.number} of sweep {self.folder.path.name}: {told}.\n"
            "# With dropout the number of workers decides its masks: for the same score leave scaling as it is.\n"
        )
        if best.history:
            head += "# pbt changed the settings on the way (see trials.jsonl): these are the last ones.\n"
        self.folder.best_path.write_text(head + dump_yaml(config), encoding="utf-8")


def refuse_tried(folder: SweepFolder, samples: int) -> None:
    """A finished sweep whose samples have all been tried cannot have more trials.

    Raises:
        RunFolderError: that is so.
    """
    if len(folder.read()) >= samples:
        raise RunFolderError(
            f"All {samples} samples of the sweep in {folder.path} have been tried. Begin a new one with a larger "
            "search space."
        )


def kept_told(trials: Sequence[Trial]) -> str:
    """Which trials a resumed sweep keeps, and which go on."""
    done = [trial.number for trial in trials if trial.has_ended]
    left = [trial.number for trial in trials if not trial.has_ended]
    words = [f"keeping trial{'s' if len(done) > 1 else ''} {ranges(done)}"] if done else []
    if left:
        words.append(f"going on with trial{'s' if len(left) > 1 else ''} {ranges(left)} from the last checkpoint")
    return ", ".join(words) or "no trial had begun"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in a few characters: 1-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def best_fields(best: Trial, metric: str, path: str) -> dict[str, Any]:
    """The winner, for sweep.json."""
    return {
        "trial": best.number,
        "sample": best.sample,
        "metric": metric,
        "score": best.best_score,
        "epoch": best.best_epoch,
        "step": best.best_step,
        "path": path,
    }


def no_winner(trials: Sequence[Trial], metric: str) -> str:
    """Why no trial can win: each reason once."""
    numbers: dict[str, list[int]] = {}
    for trial in trials:
        numbers.setdefault(trial.why or f"no {metric}", []).append(trial.number)
    told = [
        f"trial{'s' if len(of_it) > 1 else ''} {ranges(of_it)}: {reason}"
        for reason, of_it in list(numbers.items())[:FEWEST_TOLD]
    ]
    more = f" (and {len(numbers) - FEWEST_TOLD} other reasons, in trials.csv)" if len(numbers) > FEWEST_TOLD else ""
    return f"No trial of {len(trials)} got a number for {metric}. {'; '.join(told)}{more}"


if __name__ == "__main__":
    sys.exit(main())
