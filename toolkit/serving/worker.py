"""One thread that computes texts for many requests, one after the other, and a bounded queue before it.

    worker = Worker(writer, waiting=64)
    job = worker.submit(lambda writer, cancelled: writer.continued(tokens, request, cancelled))
    async for piece in job: ...

A job whose reader leaves is cancelled: it stops before the model's next pass, and one that waits never begins.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from toolkit.errors import UserError
from toolkit.offload.generation import Writer

Compute = Callable[[Writer, Callable[[], bool]], Iterator[Any]]


class BusyError(UserError):
    """The queue is full."""


class StoppedError(UserError):
    """The work was cancelled before it was done."""

    def __init__(self):
        super().__init__("the server is stopping: this answer is not whole")


class Work:
    """The work of one request: an iterator over its results, for the event loop that made it.

    An error of the computation is raised there.
    """

    def __init__(self, compute: Compute):
        self._compute, self._cancelled = compute, threading.Event()
        self._loop, self._results = asyncio.get_running_loop(), asyncio.Queue()

    def cancel(self) -> None:
        """Stop before the next pass."""
        self._cancelled.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        """The results as they come."""
        return self

    async def __anext__(self) -> Any:
        """The next result."""
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def run(self, writer: Writer) -> None:
        """Compute, in the worker's thread."""
        try:
            if self._cancelled.is_set():
                raise StoppedError
            for result in self._compute(writer, self._cancelled.is_set):
                self._give(result)
            self._give(StopAsyncIteration())
        except Exception as error:
            self._give(error)

    def _give(self, result: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)


class Worker:
    """Runs jobs in the order in which they came. `waiting` is how many may wait beside the one that runs."""

    def __init__(self, writer: Writer, waiting: int):
        self._writer, self._jobs = writer, queue.Queue(waiting)
        self._running: Work | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def submit(self, compute: Compute) -> Work:
        """A job that runs when its turn comes. Raises `BusyError` if too many wait, and `StoppedError` at the end."""
        if self._ended:
            raise StoppedError
        job = Work(compute)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise BusyError(f"{self._jobs.maxsize} requests wait already: try again later") from None
        return job

    def cancel(self) -> None:
        """Cancel all jobs, those that wait too."""
        self._ended = True
        if job := self._running:
            job.cancel()

    def close(self) -> None:
        """Cancel all jobs and wait for the pass under way."""
        self.cancel()
        self._thread.join()

    def _run(self) -> None:
        while not (self._ended and self._jobs.empty()):
            try:
                self._running = job = self._jobs.get(timeout=0.1)
            except queue.Empty:
                continue
            if self._ended:  # `cancel` may have looked before there was a job to cancel
                job.cancel()
            job.run(self._writer)
            self._running = None
