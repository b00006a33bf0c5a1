"""A figure that follows controls: it is drawn when one moves, once for several, and stands still elsewhere."""

import pytest
from ipywidgets import IntSlider
from matplotlib.figure import Figure

from toolkit.errors import UserError
from toolkit.evidence.interactive import Interactive
from toolkit.progress import has_front_end


@pytest.fixture
def view():
    """Draws a × b; refuses a product of 42. `view.drawn` lists what was drawn."""
    drawn = []

    def draw(a, b):
        if a * b == 42:
            raise UserError("42 is no question")
        drawn.append((a, b))
        return Figure((1, 1)), f"{a * b}"

    made = Interactive(draw, a=IntSlider(2), b=IntSlider(3))
    made.drawn = drawn
    return made


def test_it_is_drawn_when_a_control_moves_and_once_for_several(view):
    assert (view.sentence, view.drawn) == ("6", [(2, 3)])
    with view.together():
        view.controls["a"].value = 5
        with view.together():  # as those who observe a control do
            view.controls["b"].value = 7
        assert view.drawn == [(2, 3)]
    assert view.drawn == [(2, 3), (5, 7)]
    with pytest.raises(RuntimeError), view.together():
        raise RuntimeError
    view.controls["a"].value = 6  # it draws again after an error inside
    assert view.sentence == "**Not possible:** 42 is no question"


def test_what_is_refused_is_said_and_the_figure_before_it_stays(view):
    view.controls["a"].value = 6
    kept = view.figure
    view.controls["b"].value = 7
    assert view.sentence == "**Not possible:** 42 is no question"
    assert view.figure is kept
    view.controls["b"].value = 8
    assert view.sentence == "48"


@pytest.mark.parametrize(("content", "expected"), [({"allow_stdin": True}, True), ({}, False)])
def test_a_front_end_is_one_that_can_ask_its_user(monkeypatch, content, expected):
    class Shell:
        class kernel:
            get_parent = staticmethod(lambda channel: {"content": content})

    assert not has_front_end()  # there is no kernel here
    monkeypatch.setattr("IPython.get_ipython", lambda: Shell)
    assert has_front_end() == expected
