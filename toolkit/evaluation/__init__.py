"""The quality of a model: perplexity as the papers count it, and accuracy on tasks through lm-eval."""

from toolkit.evaluation.harness import HUB_TASKS, evaluate_tasks
from toolkit.evaluation.likelihood import Perplexity, paired_difference, perplexity
from toolkit.evaluation.local_tasks import LOCAL_TASKS

__all__ = ["HUB_TASKS", "LOCAL_TASKS", "Perplexity", "evaluate_tasks", "paired_difference", "perplexity"]
