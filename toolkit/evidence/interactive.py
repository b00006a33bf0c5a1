"""A figure that follows controls in JupyterLab, and a still picture of it wherever nobody can move them.

here = stage()                           # in the first cell, so that the controls are on top
...
view = Interactive(draw, sparsity=widgets.FloatSlider(0.5, min=0, max=1))   # draw(sparsity=0.5) -> figure, sentence
view.show(stage=here)
view.controls["sparsity"].value = 0.7    # draws again, in a test as well
view.sentence, view.figure
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

from toolkit.errors import UserError
from toolkit.evidence.figures import use_style
from toolkit.extras import extra
from toolkit.progress import has_front_end

with extra("lab"):
    from IPython.display import DisplayHandle, Image, Javascript, Markdown, display
    from ipywidgets import Box, Layout, ValueWidget, Widget
    from matplotlib.figure import Figure

STILL = "*A still picture. The controls are there when this notebook runs in JupyterLab: `./papermill_runs.sh --lab`.*"
READY = "*Controls and figure appear here once all cells have run.*"
DPI = 100
TO_THE_TOP = """\
for (const panel of document.querySelectorAll(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer"))
    for (const wait of [0, 300, 1000]) setTimeout(() => { panel.scrollTop = 0; }, wait);
"""  # the Lab stays at the last cell after Run All Cells


def stage() -> list[DisplayHandle]:
    """Room in the output of this cell for controls, sentence and figure; none outside of IPython."""
    return [handle for text in (READY, "", "") if (handle := display(Markdown(text), display_id=True))]


class Interactive:
    """Controls, and the figure and sentence that are made of their values.

    Args:
        draw: takes the value of each control by its name, and gives a figure and a sentence in Markdown. Figures made
            by `matplotlib.figure.Figure` go when the next one comes; those of pyplot stay in memory.
        idle: takes the same values, and gives the names of the controls that do not apply to them: these are greyed.
        controls: by the names of draw's parameters.

    A `UserError` of draw becomes the sentence, and the figure before it stays.
    """

    def __init__(
        self,
        draw: Callable[..., tuple[Figure, str]],
        idle: Callable[..., Collection[str]] = lambda **values: (),
        **controls: ValueWidget,
    ):
        use_style()
        self.draw, self.idle, self.controls = draw, idle, controls
        self.figure, self.sentence = Figure(), ""
        self._shown: list[DisplayHandle] = []
        self._held = False
        self.update()
        for control in controls.values():
            control.observe(self.update, "value")

    def update(self, change: object = None) -> None:
        """Draw with the values that the controls have now."""
        if self._held:
            return
        values = {name: each.value for name, each in self.controls.items()}
        idle = self.idle(**values)
        for name, control in self.controls.items():
            control.disabled = name in idle
        try:
            self.figure, self.sentence = self.draw(**values)
        except UserError as error:
            self.sentence = f"**Not possible:** {error}"
        if self._shown:
            for handle, content in zip(self._shown, self._contents(), strict=True):
                handle.update(content)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block controls change without drawing; it is drawn once at the end of the outermost block."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
        self.update()

    def show(self, widget: Widget | None = None, stage: Sequence[DisplayHandle] = ()) -> None:
        """Show the controls, or the widget given in their place, and below them the sentence and the figure.

        They appear on the `stage`, or else here. Without a front end there are no controls, and a line says so.
        """
        controls = widget or Box([*self.controls.values()], layout=Layout(flex_flow="row wrap"))
        contents = [controls if has_front_end() else Markdown(STILL), *self._contents()]
        handles = stage or [display(content, display_id=True) for content in contents]
        self._shown = [handle for handle in handles if handle][1:]  # none outside of IPython
        for handle, content in zip(stage, contents, strict=False):
            handle.update(content)
        if stage and has_front_end():
            display(Javascript(TO_THE_TOP))
        gc.freeze()  # else Python looks through all that is loaded every few moves, for half a second

    def _contents(self) -> tuple[Markdown, Image]:
        picture = BytesIO()
        self.figure.savefig(picture, format="png", dpi=DPI, pil_kwargs={"compress_level": 1})  # the quickest
        return Markdown(self.sentence), Image(picture.getvalue())
