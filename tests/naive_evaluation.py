"""Slow, obvious oracles for perplexity and for scoring choices."""

import math

import torch


def window_nlls(model, tokens, sequence_length):
    """The negative log-likelihood of every predicted token, window by window, one position after the other."""
    result = []
    for start in range(0, len(tokens) - sequence_length + 1, sequence_length):
        window = tokens[start : start + sequence_length]
        nlls = []
        for position in range(1, sequence_length):
            probabilities = torch.softmax(model(window[None, :position]).logits[0, -1].double(), 0)
            nlls.append(-math.log(probabilities[window[position]].item()))
        result.append(nlls)
    return result


def best_choice(model, tokenizer, context, choices):
    """The choice with the greatest log-likelihood after the context."""
    start = len(tokenizer(context)["input_ids"])
    scores = []
    for choice in choices:
        ids = torch.tensor(tokenizer(f"{context} {choice}")["input_ids"])
        logits = model(ids[None]).logits[0].double()
        scores.append(sum(logits[i - 1].log_softmax(0)[ids[i]].item() for i in range(start, len(ids))))
    return max(range(len(choices)), key=scores.__getitem__)
