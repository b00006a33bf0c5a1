"""The ring by hand: the order in which layers are fetched, and no layer's bytes under another's name."""

from concurrent.futures import Future

import pytest

from toolkit.offload.ring import Ring


class Disk:
    """Fetches at once: a buffer is a list that then holds the layer's number. The layers in `broken` fail once."""

    def __init__(self, layers, slots):
        self.fetched, self.broken, self.refused = [], set(), set()
        self.ring = Ring(
            range(layers), [[None] for _ in range(slots)], self.fetch, lambda number, buffer: {number: buffer}
        )

    def fetch(self, number, buffer):
        self.fetched.append(number)
        buffer[0] = None  # the bytes that were there are gone, whatever comes
        if number in self.refused:
            self.refused.remove(number)
            raise OSError("no read was started")
        done = Future()
        if number in self.broken:
            self.broken.remove(number)
            done.set_exception(OSError("bad sector"))
        else:
            buffer[0] = number
            done.set_result(None)
        return done

    def asks(self, number):
        """The layer whose bytes a caller finds, who uses its views."""
        ((name, buffer),) = self.ring.layer(number).items()
        assert name == number
        return buffer[0]


def test_the_next_layer_is_fetched_while_this_one_is_used_and_the_first_follows_the_last():
    disk = Disk(layers=3, slots=2)
    assert [disk.asks(number) for number in (0, 1, 2, 0, 1)] == [0, 1, 2, 0, 1]
    assert disk.fetched == [0, 1, 2, 0, 1, 2]


def test_a_layer_that_is_not_needed_any_more_leaves_its_slot_to_the_one_after_next():
    disk = Disk(layers=4, slots=2)
    assert disk.asks(0) == 0
    disk.ring.go_on()
    assert disk.fetched == [0, 1, 2]
    assert [disk.asks(number) for number in (1, 2, 3)] == [1, 2, 3]
    assert disk.fetched == [0, 1, 2, 3, 0]


def test_one_slot_fetches_nothing_ahead_and_a_slot_for_each_layer_fetches_once():
    alone, roomy = Disk(layers=3, slots=1), Disk(layers=2, slots=2)
    assert [alone.asks(number) for number in (0, 0, 1, 0)] == [0, 0, 1, 0]
    assert alone.fetched == [0, 1, 0]
    assert [roomy.asks(number) for number in (0, 1) * 3] == [0, 1] * 3
    assert roomy.fetched == [0, 1]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("way", ["broken", "refused"])
def test_a_layer_that_did_not_come_is_fetched_again(slots, way):
    disk = Disk(layers=3, slots=slots)
    assert [disk.asks(number) for number in (0, 1, 2)] == [0, 1, 2]
    getattr(disk, way).add(1)
    with pytest.raises(OSError, match="bad sector" if way == "broken" else "no read was started"):
        [disk.asks(number) for number in (0, 1)]
    assert [disk.asks(number) for number in (0, 1, 2, 1)] == [0, 1, 2, 1]
