"""The model: any encoder with its own head or a pooled one, as plain modules."""
