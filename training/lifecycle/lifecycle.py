"""Saving, stop requests and heartbeat of a run."""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from parallel.comm.collectives import Agreement
from training.checkpoint.saving import CheckpointError, Saver
from training.config import Config
from training.lifecycle.preemption import REASONS, StopRequests
from training.lifecycle.watchdog import Watchdog

P = ParamSpec("P")


class Lifecycle:
    """Saving, stopping and heartbeat of a run, called after every step on every rank.

    If an event such as a signal reaches one rank, all ranks react to it in the same step.
    """

    def __init__(
        self,
        config: Config,
        saver: Saver,
        stops: StopRequests,
        watchdog: Watchdog,
        agreement: Agreement,
    ) -> None:
        self.config = config
        self.saver = saver
        self.stops = stops
        self.watchdog = watchdog
        self.agreement = agreement
        self.step = 0
        self._asked_about_save = False
        self._stop = 0

    @property
    def reason(self) -> str | None:
        """Reason for the requested stop, None if no stop is requested."""
        return REASONS.get(self._stop)

    @property
    def stopping(self) -> bool:
        """Whether the run is stopping, the same on all ranks."""
        return self._stop > 0

    def deferring(self, call: Callable[P, None]) -> Callable[P, None]:
        """Return a function that runs `call` and stores its first error for `raise_deferred`.

        Use it for work between steps, so that the run saves before it ends with the error.
        """

        def deferred(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.stops.error = self.stops.error or error

        return deferred

    def raise_deferred(self) -> None:
        """Raise this rank's deferred error, if any."""
        if self.stops.error is not None:
            raise self.stops.error

    def after_step(self, step: int) -> None:
        """Advance a save that all ranks have written, and exchange stop requests.

        Raises CheckpointError after the last failed attempt to save.
        """
        self.step = step
        self.watchdog.beat(step)
        failed, busy = self.saver.status()
        asked, self._asked_about_save = self._asked_about_save, self.saver.busy
        answer = self.agreement.delayed([self.stops.wanted(), failed, busy])
        if answer is None:  # no exchange was running
            return
        stop, failed, busy = answer
        if failed:
            self.saver.fail()
            self.stop_now()  # drop the pending exchange, which would report the failure again
        elif asked and not busy:
            self.saver.advance()
            self._asked_about_save = False  # the pending exchange still reports the finished save
        self._stop = self._stop or stop

    def stop_now(self) -> bool:
        """Return whether any rank has a stop request; collective, for use between steps."""
        self.watchdog.beat(self.step)
        self._stop = self._stop or self.agreement.now([self.stops.wanted(), 0, 0])[0]
        return self._stop > 0

    def due(self, step: int) -> bool:
        """Return whether a regular checkpoint is due after `step`."""
        interval = self.config.checkpoint.interval
        return interval > 0 and step % interval == 0

    def save(self, meta: Mapping[str, Any]) -> None:
        """Begin a save after the previous one is complete."""
        self.wait()
        self.saver.begin(meta)

    def save_last(self, meta: Mapping[str, Any]) -> None:
        """Save the last step unless it is already saved, and clear the stop request.

        Raises CheckpointError if the state is not finite.
        """
        if self.config.checkpoint.interval > 0:
            self.wait()
            if self.saver.last_saved != meta["step"]:
                self.saver.begin(meta)
                self.wait()
            if self.saver.last_saved != meta["step"]:
                raise CheckpointError(
                    f"the last step, {meta['step']}, could not be saved: its state is not finite"
                )
        if self.stopping:
            self.stops.obeyed()
        self.raise_deferred()

    def wait(self) -> None:
        """Wait until a running save is complete."""
        self.saver.wait(self._failed_anywhere, lambda: self.watchdog.beat(self.step))
        self._asked_about_save = False

    def _failed_anywhere(self, failed: bool) -> bool:
        """Return whether `failed` is true on any rank.

        The call drops the pending exchange of `after_step`, so it also exchanges stop requests.
        """
        stop, failures, _ = self.agreement.now([self.stops.wanted(), int(failed), 0])
        self._stop = self._stop or stop
        return failures > 0
