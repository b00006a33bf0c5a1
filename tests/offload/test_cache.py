"""The ring by hand: the order in which layers are fetched, and no layer's bytes under another's name."""

from concurrent.futures import Future

import pytest

from toolkit.offload.cache import Ring


class Disk(Ring):
    """Fetches at once: a buffer then holds the layer's number. The layers in `broken` fail once."""

    def __init__(self, layers, slots, staying=0):
        self.fetched, self.broken, self.refused = [], set(), set()
        self.buffers = [None] * (slots + staying)
        super().__init__(range(staying, staying + layers), slots, range(staying))

    def _fetch(self, number, slot):
        self.fetched.append(number)
        self.buffers[slot] = None  # the bytes that were there are gone, whatever comes
        if number in self.refused:
            self.refused.remove(number)
            raise OSError("no read was started")
        done = Future()
        if number in self.broken:
            self.broken.remove(number)
            done.set_exception(OSError("bad sector"))
        else:
            self.buffers[slot] = number
            done.set_result(None)
        return done

    def _view(self, number, slot):
        return {}

    def asks(self, number):
        """The layer whose bytes a caller finds."""
        return self.buffers[self.slot(number)]


def test_the_next_layer_is_fetched_while_this_one_is_used_and_the_first_follows_the_last():
    disk = Disk(layers=3, slots=2)
    assert [disk.asks(number) for number in (0, 1, 2, 0, 1)] == [0, 1, 2, 0, 1]
    assert disk.fetched == [0, 1, 2, 0, 1, 2]


def test_a_layer_that_is_not_needed_any_more_leaves_its_slot_to_the_one_after_next():
    disk = Disk(layers=4, slots=2)
    assert disk.asks(0) == 0
    disk.go_on()
    assert disk.fetched == [0, 1, 2]
    assert [disk.asks(number) for number in (1, 2, 3)] == [1, 2, 3]
    assert disk.fetched == [0, 1, 2, 3, 0]


def test_a_layer_that_stays_leaves_the_slot_of_the_one_before_it_to_the_one_after_next():
    disk = Disk(layers=4, slots=2, staying=1)
    assert disk.asks(1) == 1
    assert disk.fetched == [0, 1, 2]
    assert disk.asks(0) == 0
    assert disk.fetched == [0, 1, 2, 3]
    assert [disk.asks(number) for number in (2, 0, 0, 3, 4)] == [2, 0, 0, 3, 4]
    assert disk.fetched == [0, 1, 2, 3, 4, 1]


def test_one_slot_fetches_nothing_ahead_and_a_slot_for_each_layer_fetches_once():
    alone, roomy = Disk(layers=3, slots=1), Disk(layers=2, slots=2)
    assert [alone.asks(number) for number in (0, 0, 1, 0)] == [0, 0, 1, 0]
    assert alone.fetched == [0, 1, 0]
    assert [roomy.asks(number) for number in (0, 1) * 3] == [0, 1] * 3
    assert roomy.fetched == [0, 1]


def test_layers_that_stay_are_fetched_first_and_once():
    disk = Disk(layers=3, slots=2, staying=2)
    assert disk.fetched == [0, 1]
    assert [disk.asks(number) for number in (0, 1, 2, 3, 4) * 2] == [0, 1, 2, 3, 4] * 2
    assert disk.fetched == [0, 1, 2, 3, 4, 2, 3, 4, 2]
    disk.clear()
    assert disk.held == [None] * 4


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("way", ["broken", "refused"])
@pytest.mark.parametrize("again", [[0, 1, 2, 1], [1, 0, 2, 1]])  # whether another layer takes its slot first
def test_a_layer_that_did_not_come_is_fetched_again(slots, way, again):
    disk = Disk(layers=3, slots=slots)
    assert [disk.asks(number) for number in (0, 1, 2)] == [0, 1, 2]
    getattr(disk, way).add(1)
    with pytest.raises(OSError, match="bad sector" if way == "broken" else "no read was started"):
        [disk.asks(number) for number in (0, 1)]
    assert [disk.asks(number) for number in again] == again
