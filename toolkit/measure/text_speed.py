"""How fast one contestant makes a text: the prompt by itself, then the tokens after it."""

from dataclasses import dataclass

from toolkit.measure.contestant import Contestant
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import take_turns

NOT_COUNTED = 2  # passes of a turn: the prompt, and a token that may compile something


@dataclass(frozen=True)
class TextSpeed:
    """Medians of the turns: `first_s` of the prompt's pass; of the tokens that count, their rate, its range, and bytes.

    `read_mb` are read from the disk for a token. `disturbed` is the share of turns beside other work.
    """

    first_s: float
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    read_mb: float
    disturbed: float
    mode: str


def text_speed(contestant: Contestant, passes: int, repetitions: int) -> TextSpeed:
    """Take turns of so many passes, of which the first is the prompt and the second does not count.

    Raises what `take_turns` raises.
    """
    spans = take_turns([contestant], repetitions, passes)
    name = dict.fromkeys(contestant.labels)
    row = summary(by_turn(spans[spans["token"] >= NOT_COUNTED], [*name]), [*name], ["tokens_per_s"]).iloc[0]
    prompts = spans[spans["token"] == 0].groupby("repetition")
    first_s = float((prompts["end_s"].max() - prompts["start_s"].min()).median())
    rates = (float(row[f"tokens_per_s{end}"]) for end in ("", "_low", "_high"))
    return TextSpeed(first_s, *rates, float(row["read_bytes"]) / 1e6, float(row["disturbed"]), str(row["mode"]))
