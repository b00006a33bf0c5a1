"""Text corpora as tokens, split into text to calibrate on and text to evaluate on."""

from toolkit.text.corpora import CORPORA, SPLITS, Article, check_corpus, load_articles, load_tokens
from toolkit.text.tokens import begun, token_ids

__all__ = ["CORPORA", "SPLITS", "Article", "begun", "check_corpus", "load_articles", "load_tokens", "token_ids"]
