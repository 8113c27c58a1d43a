"""Cuts both answers of a pair to the same number of words.

Longer answers usually win. Cut to the shorter one's length, only the longer one would stop in the middle of
a sentence, which tells as much. So both lose their ends, and are then about as short as the policy's answers.
"""

WORDS = 48
"""Longest answer, in words: about 64 tokens. The policy writes 48."""
FEWEST_WORDS = 8
PROMPT_WORDS = 60
USEFUL = f"a prompt of at most {PROMPT_WORDS} words, two different answers of more than {FEWEST_WORDS}"


def cut(row: dict) -> dict:
    """Returns the pair with equally many words in both answers, and with the answers' own numbers of words."""
    lengths = {key: len(row[key].split()) for key in ("chosen", "rejected")}
    count = min(WORDS, *(length - 1 for length in lengths.values()))
    answers = {key: first_words(row[key], count) for key in lengths}
    return {"prompt": row["prompt"], **answers, "count": count, "longer_wins": lengths["chosen"] > lengths["rejected"]}


def first_words(text: str, count: int) -> str:
    """Returns the text up to the end of a word, with its blanks and line breaks."""
    end = 0
    for word in text.split()[:count]:
        end = text.index(word, end) + len(word)
    return text[:end]


def is_useful(pair: dict) -> bool:
    """Returns whether a cut pair has short, different answers to a short prompt."""
    is_short = len(pair["prompt"].split()) <= PROMPT_WORDS
    return is_short and pair["count"] >= FEWEST_WORDS and pair["chosen"] != pair["rejected"]
