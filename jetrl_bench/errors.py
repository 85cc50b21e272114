"""Errors that are neither bad input nor a bug."""


class WorkerDied(RuntimeError):
    """A worker or engine process died, hangs, or holds weights that nobody can vouch for: the run ends, exit code 3."""


class NotFinite(ValueError):
    """NaN or inf in a forward pass, a loss or a gradient; the message says where. A run ends, its rows are kept."""
