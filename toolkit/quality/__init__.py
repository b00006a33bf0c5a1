"""The quality of a model: text corpora, perplexity as the papers count it, and accuracy on tasks through lm-eval."""

from toolkit.quality.corpora import CORPORA, SPLITS, Article, check_corpus, load_articles, load_tokens
from toolkit.quality.harness import HUB_TASKS, evaluate_tasks
from toolkit.quality.likelihood import Perplexity, begun, paired_difference, perplexity, perplexity_of, token_ids
from toolkit.quality.local_tasks import LOCAL_TASKS

__all__ = [
    "CORPORA",
    "HUB_TASKS",
    "LOCAL_TASKS",
    "SPLITS",
    "Article",
    "Perplexity",
    "begun",
    "check_corpus",
    "evaluate_tasks",
    "load_articles",
    "load_tokens",
    "paired_difference",
    "perplexity",
    "perplexity_of",
    "token_ids",
]
