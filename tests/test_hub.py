import contextlib
import threading

from toolkit import hub


class Part:
    answer = "former"


@contextlib.contextmanager
def changed():
    former, Part.answer = Part.answer, "changed"
    yield
    Part.answer = former


def test_the_last_of_several_threads_puts_the_former_value_back():
    """Whichever leaves first."""
    inside, leave = threading.Barrier(2), threading.Event()

    def other():
        with hub._shared("answer", changed):
            inside.wait()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with hub._shared("answer", changed):
        inside.wait()
    assert Part.answer == "changed"  # for the other one
    leave.set()
    thread.join()
    assert Part.answer == "former"
    assert not hub._CHANGES
