"""Labelled text to a BERT-style classifier, trained on every GPU you have, then on your cluster."""

__version__ = "0.1.0"
