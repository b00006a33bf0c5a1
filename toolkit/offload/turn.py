"""A lock for passes: the layers of a model share buffers, so a second thread would overwrite the weights in use."""

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

from torch import nn

from toolkit.errors import UserError
from toolkit.models.new_tensors import of_float32


class Offloaded(nn.Module):
    """A module whose weights are elsewhere. It can be called by itself, and has the model's turn while it runs.

    It cannot be copied or pickled: what it reads through is open in this process alone.
    """

    def __reduce_ex__(self, protocol: object):
        """Refuse copies. Raises `UserError`."""
        raise UserError("a model that runs from disk cannot be copied or pickled: open its folder once more")

    def close(self) -> None:
        """Release the memory."""


class Turn:
    """The right to run a model. One thread has it at a time, as often as it likes.

    A second thread is refused at once, since waiting would hide that the two passes do not run beside each other.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._ended = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn in the block. Raises `UserError` while another thread has it, after `end`, and after a fork."""
        if os.getpid() != self._process:  # the threads that read are the parent's: a pass would wait for them for ever
            raise UserError(
                f"this model was opened in process {self._process}, which forked this one: open its folder here, or "
                "start this process by `spawn`"
            )
        if not self._lock.acquire(blocking=False):
            raise UserError("this model is running in another thread: wait for it, or open the folder once more")
        try:
            if self._ended:
                raise UserError("this model was closed: open its folder again")
            with of_float32():
                yield
        finally:
            self._lock.release()

    def end(self) -> None:
        """Refuse all later passes, and wait for the one under way. Text that another thread generates ends here."""
        self._ended = True
        with self._lock:
            pass

    def guard(self, forward: Callable) -> Callable:
        """The same function, which has the turn while it runs. A method is taken as `unowned` makes it."""
        forward = unowned(forward) if isinstance(forward, MethodType) else forward

        @functools.wraps(forward)
        def guarded(*arguments, **named):
            with self.taken():
                return forward(*arguments, **named)

        return guarded


def unowned(method: MethodType) -> Callable:
    """A method as a function that does not keep its object alive.

    An object that holds its own method is freed by Python's cycle collector alone, which counts objects, not bytes.
    """
    function, owner = method.__func__, weakref.ref(method.__self__)

    @functools.wraps(function)
    def called(*arguments, **named):
        return function(owner(), *arguments, **named)

    called.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return called
