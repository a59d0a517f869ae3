"""Label new text with a trained model: `python -m raytrain_bert.predict RUN --text "..."`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from raytrain_bert import command
from raytrain_bert.config.errors import DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="raytrain-bert predict",
        description="Label text with a trained model. Prints one JSON object a text.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="Run folder of a finished run, or its model folder.")
    parser.add_argument(
        "--text",
        action="append",
        metavar="TEXT",
        help="Text to label; may be repeated. Without it: a text a line of stdin.",
    )
    parser.add_argument("--text-pair", action="append", metavar="TEXT", help="Second text of each --text, for pairs.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run Python code that comes with the model.")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if arguments.text_pair is not None and len(arguments.text_pair) != len(arguments.text or []):
        parser.error("--text-pair is needed as often as --text")

    if arguments.text is None and sys.stdin.isatty():
        parser.error("give --text, or texts on standard input, one a line")

    def body() -> int:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder holds all that is needed
        from raytrain_bert.inference import Classifier

        texts = arguments.text if arguments.text is not None else sys.stdin.read().splitlines()
        if not texts:
            raise DataError("There is no text: give --text, or texts on standard input, one a line.")
        classifier = Classifier.load(arguments.run, trust_remote_code=arguments.trust_remote_code)
        for text, prediction in zip(texts, classifier.predict(texts, arguments.text_pair), strict=True):
            line = {"label": prediction.label, "probability": round(prediction.probability, 4), "text": text}
            print(json.dumps(line, ensure_ascii=False))
        return command.DONE

    return command.guard(body, command.print_error, lambda: None)


if __name__ == "__main__":
    sys.exit(main())
