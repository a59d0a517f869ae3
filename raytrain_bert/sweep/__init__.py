"""Sweeps: many training runs, of which the best is wanted."""
