"""A figure that follows controls in JupyterLab, and a still picture of it wherever nobody can move them.

view = Interactive(draw, sparsity=widgets.FloatSlider(0.5, min=0, max=1))   # draw(sparsity=0.5) -> figure, sentence
view.show()
view.controls["sparsity"].value = 0.7    # draws again, in a test as well
view.sentence, view.figure
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

from IPython import get_ipython
from IPython.display import DisplayHandle, Image, Markdown, display
from ipywidgets import Box, Layout, ValueWidget, Widget
from matplotlib.figure import Figure

from toolkit.errors import UserError
from toolkit.evidence.figures import use_style

STILL = "*A still picture. The controls are there when this notebook runs in JupyterLab: `./papermill_runs.sh --lab`.*"
DPI = 100


class Interactive:
    """Controls, and the figure and sentence that are made of their values.

    Args:
        draw: takes the value of each control by its name, and gives a figure and a sentence in Markdown. Figures made
            by `matplotlib.figure.Figure` go when the next one comes; those of pyplot stay in memory.
        controls: by the names of draw's parameters.

    A `UserError` of draw becomes the sentence, and the figure before it stays.
    """

    def __init__(self, draw: Callable[..., tuple[Figure, str]], **controls: ValueWidget):
        use_style()
        self.draw, self.controls = draw, controls
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
        try:
            self.figure, self.sentence = self.draw(**{name: each.value for name, each in self.controls.items()})
        except UserError as error:
            self.sentence = f"**Not possible:** {error}"
        if self._shown:
            for handle, content in zip(self._shown, self._contents(), strict=True):
                handle.update(content)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block controls change without drawing; it is drawn once at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.update()

    def show(self, *widgets: Widget) -> None:
        """Show the controls, or the widgets given in their place, and below them the sentence and the figure.

        Without a front end there are no controls, and a line says so.
        """
        if has_front_end():
            display(*(widgets or [Box([*self.controls.values()], layout=Layout(flex_flow="row wrap"))]))
        else:
            display(Markdown(STILL))
        handles = [display(content, display_id=True) for content in self._contents()]
        self._shown = [handle for handle in handles if handle]  # none outside of IPython
        gc.freeze()  # else Python looks through all that is loaded every few moves, for half a second

    def _contents(self) -> tuple[Markdown, Image]:
        picture = BytesIO()
        self.figure.savefig(picture, format="png", dpi=DPI, pil_kwargs={"compress_level": 1})  # the quickest
        return Markdown(self.sentence), Image(picture.getvalue())


def has_front_end() -> bool:
    """Whether a person may move controls: the program that runs this cell takes questions of the kernel to its user.

    JupyterLab and editors do. papermill and nbconvert, which only run cells, say with each cell that they do not.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin"))
