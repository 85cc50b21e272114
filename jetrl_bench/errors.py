"""The one error that is neither bad input nor a bug."""


class WorkerDied(RuntimeError):
    """A worker or engine process died, hangs, or holds weights that nobody can vouch for: the run ends, exit code 3."""
