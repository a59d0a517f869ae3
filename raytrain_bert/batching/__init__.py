"""Which rows a step takes, how they are dealt to workers and cut in micro batches, and the tensors made of them."""
