"""The task: a product of two digits, a calculator that knows it, and the reward of what a response makes of it."""


def calculate(prompt: str, response: str) -> str:
    """Answers each "=" of the response to "6*7?" with "42"."""
    left, right = prompt.removesuffix("?").split("*")
    return f"{int(left) * int(right):02}"


def reward(texts: list[str]) -> list[float]:
    """Returns 0.2 for a call, 0.2 for each right digit behind it, and 0.4 for the right answer and nothing else.

    "6*7?=4242" has 1.0: the call, the calculator's two digits, and the policy's own two.
    """
    return [reward_of(*text.split("?", 1)) for text in texts]


def reward_of(prompt: str, response: str) -> float:
    """Returns the reward of one response."""
    before, call, rest = response.rpartition("=")
    answer, want = rest[2:] if call else response, calculate(prompt, response)
    right = sum(own == digit for own, digit in zip(answer, want, strict=False))
    return 0.2 * (call != "" and before == "") + 0.2 * right + 0.4 * (answer == want)
