"""The search space: a domain for each searched setting, by the configuration's own dotted keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.load import readable, settings_of, unknown, with_absolute_paths
from raytrain_bert.config.schema import Config

Sample = dict[str, Any]
"""Values by dotted key."""

# How many numbers each domain of numbers takes; the last one of the q kinds is the step.
NUMBERS = {"uniform": 2, "loguniform": 2, "quniform": 3, "qloguniform": 3, "randint": 2}
LISTS = ("choice", "grid")
KINDS = (*NUMBERS, *LISTS)

# What decides what a score means cannot be searched: the scores could not be compared.
FIXED_SECTIONS = ("output", "scaling", "checkpoint", "sweep", "search")
SEARCHED_DATA = ("data.max_length",)
FIXED = ("train.best_metric",)
# These decide the tokens; each combination is tokenised once, before the first trial.
TOKEN_KEYS = ("data.max_length", "model.name", "model.revision", "model.trust_remote_code")

DEFAULT_SEARCH: dict[str, Any] = {
    "optim.learning_rate": {"loguniform": [1e-5, 5e-4]},
    "optim.warmup_fraction": {"uniform": [0.0, 0.2]},
    "optim.layer_decay": {"uniform": [0.8, 1.0]},
    "train.global_batch_size": {"choice": [16, 32]},
}


@dataclass(frozen=True)
class Domain:
    """The values that one setting may take."""

    key: str
    kind: str
    arguments: tuple[Any, ...]
    """Numbers (low, high[, step]; randint's high is left out, as in Ray Tune), or the values of choice and grid."""
    when: tuple[tuple[str, Any], ...] = ()
    """The setting is searched only where these others have these values."""

    @property
    def is_list(self) -> bool:
        """Whether the values are listed."""
        return self.kind in LISTS

    def draw(self, rng: np.random.Generator) -> Any:
        """A random value."""
        if self.is_list:
            return self.arguments[int(rng.integers(len(self.arguments)))]
        low, high, *step = self.arguments
        if self.kind == "randint":
            return int(rng.integers(low, high))
        if self.kind.endswith("loguniform"):
            value = math.exp(rng.uniform(math.log(low), math.log(high)))
        else:
            value = rng.uniform(low, high)
        value = min(max(value, low), high)  # exp(log(x)) may leave the interval by a rounding error
        return self._rounded(value) if step else value

    def suggest(self, trial: Any) -> Any:
        """The value that an optuna.Trial suggests."""
        if self.is_list:  # Optuna's categories are plain values; lists and mappings go by their number
            return self.arguments[trial.suggest_categorical(self.key, range(len(self.arguments)))]
        low, high, *step = self.arguments
        if self.kind == "randint":
            return trial.suggest_int(self.key, low, high - 1)
        value = trial.suggest_float(self.key, low, high, log=self.kind.endswith("loguniform"))
        return self._rounded(value) if step else value

    def encoded(self, value: Any) -> Any:
        """A value as Optuna has it."""
        return self.arguments.index(value) if self.is_list else value

    def distribution(self) -> Any:
        """The domain as one of optuna.distributions."""
        from optuna import distributions

        if self.is_list:
            return distributions.CategoricalDistribution(list(range(len(self.arguments))))
        low, high, *_ = self.arguments
        if self.kind == "randint":
            return distributions.IntDistribution(low, high - 1)
        return distributions.FloatDistribution(low, high, log=self.kind.endswith("loguniform"))

    def perturbed(self, value: Any, rng: np.random.Generator) -> Any:
        """A neighbour of a value: 0.8 or 1.2 times it, or the next in the list (Jaderberg et al. 2017)."""
        if self.is_list:
            here = self.arguments.index(value)
            near = [i for i in (here - 1, here + 1) if 0 <= i < len(self.arguments)]
            return self.arguments[near[int(rng.integers(len(near)))]] if near else value
        low, high, *step = self.arguments
        moved = value * float(rng.choice([0.8, 1.2]))
        if self.kind == "randint":
            rounded = round(moved) if round(moved) != value else value + int(rng.choice([-1, 1]))
            return min(max(rounded, low), high - 1)
        moved = min(max(moved, low), high)
        return self._rounded(moved) if step else moved

    def ends(self) -> list[Any]:
        """The values to be checked against the schema: all of a list, the ends of an interval."""
        if self.is_list:
            return list(self.arguments)
        low, high, *step = self.arguments
        if self.kind == "randint":
            return [low, high - 1]
        # A value inside shows whether fractions are allowed.
        return [low, high, *([] if step else [low + (high - low) / math.pi])]

    def told(self) -> str:
        """The domain in a few words."""
        if self.is_list:
            text = ", ".join("none" if value is None else str(value) for value in self.arguments)
        else:
            low, high, *step = self.arguments
            text = f"{low:g} to {high - 1 if self.kind == 'randint' else high:g}"
            text += f" in steps of {step[0]:g}" if step else ""
        text = f"{self.kind} {text}"
        if self.when:
            text += " where " + ", ".join(f"{key} is {'none' if v is None else v}" for key, v in self.when)
        return text

    def _rounded(self, value: float) -> float:
        """To the step, inside the interval, without the dust of binary fractions."""
        low, high, step = self.arguments
        steps = min(max(round(value / step), math.ceil(low / step - 1e-9)), math.floor(high / step + 1e-9))
        return float(f"{steps * step:.12g}")


@dataclass(frozen=True)
class Space:
    """All domains; those that depend on others come after them."""

    domains: tuple[Domain, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The searched settings."""
        return tuple(domain.key for domain in self.domains)

    @property
    def is_grid(self) -> bool:
        """Whether every searched setting is a grid."""
        return all(domain.kind == "grid" for domain in self.domains)

    def grid(self, kinds: Sequence[str] = ("grid",)) -> list[Sample]:
        """Every combination of the settings of these kinds, each once; the first key turns slowest."""
        crossed = [domain for domain in self.domains if domain.kind in kinds]
        combinations = itertools.product(*(domain.arguments for domain in crossed))
        samples: list[Sample] = []
        for values in combinations:
            sample = self.active(dict(zip((domain.key for domain in crossed), values, strict=True)), whole=False)
            if sample not in samples:
                samples.append(sample)
        return samples

    def draw(self, rng: np.random.Generator, fixed: Sample | None = None) -> Sample:
        """A random value for each setting that is not fixed and whose condition holds."""
        # Drawn for all, so that one condition does not move the random numbers of the others.
        drawn = {domain.key: domain.draw(rng) for domain in self.domains}
        return self.active(drawn | (fixed or {}))

    def suggest(self, trial: Any) -> Sample:
        """A value for each setting whose condition holds, from an optuna.Trial."""
        sample: Sample = {}
        for domain in self.domains:
            if holds(domain, sample):
                sample[domain.key] = domain.suggest(trial)
        return sample

    def perturbed(self, sample: Sample, rng: np.random.Generator, keys: Sequence[str]) -> Sample:
        """Some settings of a sample moved to neighbours, or one in four drawn anew."""
        moved = dict(sample)
        for domain in self.domains:
            if domain.key in sample and domain.key in keys:
                again = rng.random() < 0.25
                moved[domain.key] = domain.draw(rng) if again else domain.perturbed(sample[domain.key], rng)
        return moved

    def active(self, sample: Sample, *, whole: bool = True) -> Sample:
        """Without the settings whose condition does not hold.

        Args:
            sample: values by key.
            whole: whether a key that is not in the sample is not searched; else what depends on it stays.
        """
        kept: Sample = {}
        for domain in self.domains:
            if domain.key in sample and holds(domain, kept, whole=whole):
                kept[domain.key] = sample[domain.key]
        return kept

    def told(self) -> list[tuple[str, str]]:
        """Each key with its domain in words."""
        return [(domain.key, domain.told()) for domain in self.domains]


def holds(domain: Domain, sample: Sample, *, whole: bool = True) -> bool:
    """Whether the condition of a domain holds for the values chosen so far."""
    return all(sample[key] == value if key in sample else not whole for key, value in domain.when)


def read_space(search: Mapping[str, Any], base: Config) -> Space:
    """Read a search space, and check every value against the schema.

    Args:
        search: a domain by dotted key: {kind: [arguments]}, with `when: {other key: value}` where it is conditional.
        base: the configuration that samples are put into.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[str] = []
    domains: dict[str, Domain] = {}
    settings = [key for key, _ in settings_of(Config)]
    for name, given in (search or DEFAULT_SEARCH).items():
        key = str(name).replace("-", "_")
        if key not in settings:
            problems.append(f"search: {unknown(key, settings, 'setting')}")
        elif is_fixed(key):
            problems.append(f"search: {key} cannot be searched: it is the same for all trials, so that they compare")
        else:
            try:
                domains[key] = _domain(key, given, settings)
            except ValueError as error:
                problems.append(f"search: {key}: {error}")
    problems += _out_of_order(domains)
    if not problems:
        problems += [problem for domain in domains.values() for problem in _refused(domain, base)]
    if problems:
        raise ConfigError.from_problems(problems)
    return Space(tuple(_as_the_schema_has_it(domain, base) for domain in _sorted(domains)))


def is_fixed(key: str) -> bool:
    """Whether a setting may not differ between trials."""
    section = key.partition(".")[0]
    return section in FIXED_SECTIONS or key in FIXED or (section == "data" and key not in SEARCHED_DATA)


def with_sample(base: Config, sample: Sample) -> Config:
    """The configuration of one trial.

    Raises:
        ValidationError: the schema refuses a value.
    """
    tree = base.model_dump()
    for key, value in sample.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    return Config.model_validate(tree)


def normalised(sample: Sample, base: Config) -> Sample:
    """The sample with each value as the schema has it: 16 for "16" or 16.0.

    Raises:
        ValidationError: the schema refuses a value.
    """
    config = with_sample(base, sample)
    return {key: value_of(config, key) for key in sample}


def value_of(config: Config, key: str) -> Any:
    """The value of a setting by its dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def token_variants(space: Space) -> list[Sample]:
    """Every combination of the searched settings that decide the tokens; one empty one where there are none.

    Raises:
        ConfigError: one of them is not listed.
    """
    keyed = [domain for domain in space.domains if domain.key in TOKEN_KEYS]
    for domain in keyed:
        if not domain.is_list:
            raise ConfigError(
                f"search: {domain.key}: {domain.kind} would tokenise the text anew for every trial; use choice."
            )
    combinations = itertools.product(*(domain.arguments for domain in keyed))
    return [dict(zip((domain.key for domain in keyed), values, strict=True)) for values in combinations]


def parse_domain(text: str) -> dict[str, Any]:
    """A domain as the command line has it: kind:argument,argument.

    Raises:
        ValueError: that is not its form.
    """
    kind, colon, arguments = text.partition(":")
    if not colon or kind not in KINDS:
        raise ValueError(f"KIND:ARGUMENT,... is expected, with {', '.join(KINDS)} as KIND, not {text!r}")
    values = [value.strip() for value in arguments.split(",")]
    return {kind: [None if value == "none" else value for value in values]}


def _domain(key: str, given: Any, settings: Sequence[str]) -> Domain:
    if isinstance(given, str):
        given = parse_domain(given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"a domain is expected, as {{loguniform: [1e-5, 5e-4]}} or {{choice: [16, 32]}}, not {given!r}"
        )
    kinds = [kind for kind in given if kind != "when"]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        near = unknown(str(kinds[0]), KINDS, "domain") if len(kinds) == 1 else "one domain is expected"
        raise ValueError(f"{near}; there are {', '.join(KINDS)}")
    kind, values = kinds[0], given[kinds[0]]
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{kind} takes a list, not {values!r}")
    when = given.get("when") or {}
    if not isinstance(when, Mapping):
        raise ValueError(f"when takes a mapping of settings to values, not {when!r}")
    conditions = tuple((str(name).replace("-", "_"), value) for name, value in when.items())
    for name, _ in conditions:
        if name not in settings:
            raise ValueError(f"when: {unknown(name, settings, 'setting')}")
    arguments = tuple(values) if kind in LISTS else _numbers(kind, values)
    return Domain(key, kind, arguments, conditions)


def _numbers(kind: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if len(values) != NUMBERS[kind]:
        names = "low, high" + (", step" if NUMBERS[kind] == 3 else "")
        raise ValueError(f"{kind} takes {NUMBERS[kind]} numbers ({names}), not {len(values)}")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(f"{kind} takes numbers, not {list(values)!r}") from None
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{kind} takes finite numbers, not {list(values)!r}")
    low, high, *step = numbers
    if not low < high:
        raise ValueError(f"the lower end must be below the upper one, not {low:g} and {high:g}")
    if kind.endswith("loguniform") and low <= 0:
        raise ValueError(f"the lower end of {kind} must be above 0, not {low:g}")
    if step and not (0 < step[0] <= high - low):
        raise ValueError(f"the step must be above 0 and fit between the ends, not {step[0]:g}")
    if step and math.ceil(low / step[0] - 1e-9) > math.floor(high / step[0] + 1e-9):
        raise ValueError(f"no multiple of {step[0]:g} lies between {low:g} and {high:g}")
    if kind == "randint":
        if not all(number.is_integer() for number in numbers):
            raise ValueError(f"randint takes whole numbers, not {list(values)!r}")
        return int(low), int(high)
    return tuple(numbers)


def _as_the_schema_has_it(domain: Domain, base: Config) -> Domain:
    """A domain whose listed values and conditions are normalised; a model folder is named by its absolute path."""

    def as_it_is(key: str, value: Any) -> Any:
        return value_of(with_absolute_paths(with_sample(base, {key: value})), key)

    values = domain.arguments
    if domain.is_list:
        values = tuple(as_it_is(domain.key, value) for value in values)
    return replace(domain, arguments=values, when=tuple((key, as_it_is(key, value)) for key, value in domain.when))


def _refused(domain: Domain, base: Config) -> list[str]:
    """What the schema says of the values of a domain."""
    problems = []
    for sample in [{domain.key: value} for value in domain.ends()] + [{key: value} for key, value in domain.when]:
        try:
            with_sample(base, sample)
        except ValidationError as error:
            problems += [f"search: {readable(detail)}" for detail in error.errors()]
    return list(dict.fromkeys(problems))


def _out_of_order(domains: Mapping[str, Domain]) -> list[str]:
    """Conditions that can never hold or go in a circle."""
    problems = []
    for domain in domains.values():
        for key, _ in domain.when:
            if key not in domains:
                problems.append(f"search: {domain.key}: when: {key} is not searched itself")
    if not problems and len(list(_sorted(domains))) < len(domains):
        problems.append("search: the conditions of `when` go in a circle")
    return problems


def _sorted(domains: Mapping[str, Domain]) -> Iterator[Domain]:
    """Each after those that it depends on; what goes in a circle is left out."""
    done: set[str] = set()
    while ready := [d for d in domains.values() if d.key not in done and all(key in done for key, _ in d.when)]:
        for domain in ready:
            done.add(domain.key)
            yield domain
