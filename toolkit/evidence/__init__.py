"""The results of notebooks: tables with their circumstances, published numbers beside ours, figures, the report."""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.evidence import figures, interactive, limits, stage_tables
    from toolkit.evidence.interactive import Interactive
    from toolkit.evidence.run import Run
    from toolkit.evidence.scores import prediction_words
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Interactive", "Run", "figures", "interactive", "limits", "prediction_words", "stage_tables"]
