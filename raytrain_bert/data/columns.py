"""Which columns hold the text, the second text and the label: as set, by their names, by their content."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig

# Names as normalise() writes them. An earlier line wins; several hits in one line are settled by content.
PAIRS = (
    ("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("sentence_a", "sentence_b"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question_1", "question_2"), ("text_a", "text_b"), ("text1", "text2"),
    ("text_1", "text_2"), ("1_string", "2_string"), ("text", "text_pair"), ("question", "sentence"),
    ("question", "passage"), ("query", "passage"), ("query", "document"),
)  # fmt: skip
TEXTS = (
    ("text", "texts", "sentence", "sentences"),
    ("review", "content", "message", "body", "tweet", "utterance", "comment", "document", "article", "post", "sms",
     "phrase", "transcript", "narrative"),
    ("question", "query", "description", "abstract", "headline", "title", "summary", "subject", "email", "input"),
    ("v2",),
)  # fmt: skip
LABELS = (
    ("label", "labels", "gold_label"),
    ("category", "class", "target"),
    ("sentiment", "intent", "topic", "emotion", "quality", "liked", "rating", "stars", "score", "polarity", "tag",
     "genre", "is_duplicate", "spam", "is_spam", "toxic", "type", "y"),
    ("v1",),
)  # fmt: skip
NEVER_LABELS = {"id", "idx", "index", "uid", "guid", "date", "time", "timestamp", "url", "name", "user", "username"}
LONGER = 1.5
"""How much longer one text column must be than the next to be taken without asking."""
CONTENT_LABELS = 1000
LABEL_CHARACTERS = 60


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are used."""

    text: str
    text_pair: str | None
    label: str

    @property
    def used(self) -> list[str]:
        """Names without the missing one, each once."""
        return list(dict.fromkeys(name for name in (self.text, self.text_pair, self.label) if name is not None))


def choose_columns(sample: pa.Table, settings: DataConfig, where: str) -> Columns:
    """Choose among the columns of the first rows of a file.

    Args:
        sample: first rows, all columns strings.
        settings: text_column, text_pair_column and label_column win where set.
        where: file, for messages.

    Raises:
        DataError: a named column is not there, or it cannot be told which is meant.
    """
    names = list(sample.column_names)
    text = find_column(settings.text_column, names, where, "--data.text-column")
    pair = find_column(settings.text_pair_column, names, where, "--data.text-pair-column")
    label = find_column(settings.label_column, names, where, "--data.label-column")
    # A column without a name is known by its number; where no column has one, the file has no header.
    named = [name for i, name in enumerate(names) if name != str(i)]
    usable = [name for name in named or names if sample[name].null_count < sample.num_rows]
    label = label or _by_name(LABELS, [n for n in usable if n not in (text, pair)], sample, where, "label")
    if text is None and pair is None:
        text, pair = _pair_by_name([name for name in usable if name != label])
    elif text is not None and pair is None:
        pair = dict(_pairs_by_name([name for name in usable if name != label])).get(text)
    text = text or _by_name(TEXTS, [n for n in usable if n not in (label, pair)], sample, where, "text")
    text = text or _text_by_content([n for n in usable if n not in (label, pair)], sample, where)
    label = label or _label_by_content([n for n in usable if n not in (text, pair)], sample, where)
    for first, second, flag in ((text, label, "label"), (text, pair, "text-pair"), (pair, label, "label")):
        if first == second:
            raise DataError(f"{where}: column {first!r} cannot be used twice. Set another --data.{flag}-column.")
    return Columns(text, pair, label)


def find_column(wanted: str | None, names: Sequence[str], where: str, flag: str) -> str | None:
    """A column by its name, or by its number counted from 0; None stays None."""
    if wanted is None or wanted in names:
        return wanted
    if wanted.isdecimal() and int(wanted) < len(names):
        return names[int(wanted)]
    folded = [name for name in names if name.lower() == wanted.lower()]
    if len(folded) == 1:
        return folded[0]
    close = difflib.get_close_matches(wanted.lower(), [name.lower() for name in names], n=1, cutoff=0.5)
    hint = next((f" Did you mean {name!r}?" for name in names if close and name.lower() == close[0]), "")
    raise DataError(f"{where}: no column {wanted!r}; columns are {', '.join(names)}.{hint} Set {flag}.")


def normalise(name: str) -> str:
    """`reviewText` -> review_text, `#1 String` -> 1_string."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^0-9a-z]+", "_", name.lower()).strip("_")


def is_known_name(name: str) -> bool:
    """Whether this is what data sets call their columns."""
    known = {n for tier in (*TEXTS, *LABELS, *PAIRS) for n in tier} | NEVER_LABELS
    return normalise(name) in known


def _pairs_by_name(names: Sequence[str]) -> list[tuple[str, str]]:
    known = {normalise(name): name for name in names}
    return [(known[first], known[second]) for first, second in PAIRS if first in known and second in known]


def _pair_by_name(names: Sequence[str]) -> tuple[str | None, str | None]:
    return next(iter(_pairs_by_name(names)), (None, None))


def _by_name(
    tiers: Sequence[Sequence[str]], names: Sequence[str], sample: pa.Table, where: str, what: str
) -> str | None:
    """The column whose name is known, or ends in a known word (airline_sentiment)."""
    whole = {name: normalise(name) for name in names}
    last = {name: word.rpartition("_")[2] for name, word in whole.items() if "_" in word}
    for words in (whole, last):
        for tier in tiers:
            hits = [name for name, word in words.items() if word in tier]
            if len(hits) == 1:
                return hits[0]
            if hits:
                return _settle(hits, sample, where, what)
    return None


def _settle(hits: Sequence[str], sample: pa.Table, where: str, what: str) -> str:
    """One of several columns that could be meant: the text by far the longest, or nobody's guess."""
    if what == "text":
        lengths = sorted(((_mean_length(sample[name]), name) for name in hits), reverse=True)
        if lengths[0][0] >= LONGER * lengths[1][0]:
            return lengths[0][1]
    raise _ambiguous(hits, sample, where, what)


def _ambiguous(hits: Sequence[str], sample: pa.Table, where: str, what: str) -> DataError:
    shown = "; ".join(f"{name!r} ({_describe(sample[name])})" for name in hits)
    pair = " (and --data.text-pair-column if both are)" if what == "text" else ""
    return DataError(f"{where}: more than one column could be the {what}: {shown}. Set --data.{what}-column{pair}.")


def _describe(column: pa.ChunkedArray) -> str:
    first = next((value for value in column.to_pylist() if value), "")
    first = first if len(first) <= 24 else first[:21] + "..."
    return f"{pc.count_distinct(column).as_py()} values such as {first!r}"


def _mean_length(column: pa.ChunkedArray) -> float:
    """Characters of a cell; a missing one has none."""
    return (pc.sum(pc.utf8_length(column)).as_py() or 0) / max(1, len(column))


def _text_by_content(names: Sequence[str], sample: pa.Table, where: str) -> str:
    """The longest column, if nothing else comes near."""
    lengths = sorted(
        ((_mean_length(sample[name]), name) for name in names if not _is_numeric(sample[name])), reverse=True
    )
    if not lengths:
        raise DataError(
            f"{where}: no column holds text; columns are {', '.join(sample.column_names)}. Set --data.text-column."
        )
    near = [name for length, name in lengths if length * LONGER > lengths[0][0] and _is_prose(sample[name])]
    if len(near) > 1:
        raise _ambiguous(sorted(near, key=sample.column_names.index), sample, where, "text")
    return lengths[0][1]


def _label_by_content(names: Sequence[str], sample: pa.Table, where: str) -> str:
    """The one column with few, short, repeated values."""
    hits = [name for name in names if normalise(name) not in NEVER_LABELS and _is_label_like(sample[name])]
    if len(hits) > 1:
        raise _ambiguous(hits, sample, where, "label")
    if not hits:
        only = " The file has one column: set --data.delimiter if it has more." if len(sample.column_names) == 1 else ""
        raise DataError(
            f"{where}: no column looks like a label; columns are {', '.join(sample.column_names)}.{only} "
            "Set --data.label-column."
        )
    return hits[0]


def _is_label_like(column: pa.ChunkedArray) -> bool:
    values = column.drop_null()
    distinct = pc.count_distinct(values).as_py()
    repeated = distinct <= max(2, min(CONTENT_LABELS, len(values) // 2))
    return distinct >= 2 and repeated and _mean_length(values) <= LABEL_CHARACTERS


def _is_prose(column: pa.ChunkedArray) -> bool:
    """Whether cells hold three words and more."""
    return float(pc.mean(pc.count_substring(column, " ")).as_py() or 0) >= 2


def _is_numeric(column: pa.ChunkedArray) -> bool:
    values = column.drop_null()
    pattern = r"^\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*$"
    return len(values) > 0 and bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())
