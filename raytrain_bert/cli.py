"""The console script: `raytrain-bert VERB` is `python -m raytrain_bert.VERB`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from raytrain_bert import __version__

VERBS = {
    "train": "train a classifier on labelled text",
    "tune": "search settings: many training runs, and the best of them",
    "predict": "label new text with a trained model",
    "submit": "send one of these to a Ray cluster as a job, and follow it",
    "doctor": "look at machine, cluster and job before training",
    "drill": "kill a short training job in several ways and see what survives",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the first word names; gives the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in VERBS:
        return int(importlib.import_module(f"raytrain_bert.{words[0]}").main(words[1:]))
    if words and words[0] == "--version":
        print(f"raytrain-bert {__version__}")
        return 0
    out = sys.stdout if words and words[0] in ("-h", "--help") else sys.stderr
    if words and out is sys.stderr:
        print(f"raytrain-bert: unknown command {words[0]!r}", file=out)
    print("usage: raytrain-bert VERB [--help] ...\n", file=out)
    for verb, meaning in VERBS.items():
        print(f"  {verb:<10} {meaning}", file=out)
    return 0 if out is sys.stdout else 2


if __name__ == "__main__":
    sys.exit(main())
