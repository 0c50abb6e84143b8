"""What a run can do without: files that tell of it, watch it, or ask it to stop."""

from types import TracebackType

from parallel.error_text import described


class Aid:
    """Context in which an OSError ends nothing but the context: training is worth more.

    The first of consecutive errors is printed as a warning.
    """

    def __init__(self, what: str) -> None:
        """`what` begins the warning."""
        self.what = what
        self._failed = False

    def __enter__(self) -> "Aid":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, OSError) and not self._failed:
            print(f"warning: {self.what}: {described(error)}; the run goes on", flush=True)
        self._failed = isinstance(error, OSError)
        return self._failed
