"""Trains a reward model on preferences, a chat model against it by REINFORCE and PPO, and compares the answers."""

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from flags import arguments, prepare, respond_flags, run_flags  # noqa: E402
from judging import Judge  # noqa: E402
from outcome import report  # noqa: E402
from pairs import read_rows  # noqa: E402
from verdict import compare, rate_accuracy  # noqa: E402

from guerdon import RewardClient  # noqa: E402
from serving import guerdon, script, serving  # noqa: E402

DONE, TIME_IS_OVER = 0, 75
"""Statuses of a run that has saved its policy."""


def main() -> None:
    args, began = arguments(__doc__), time.monotonic()
    out, reward_model, ended = args.out, args.out / "reward_model", (DONE, TIME_IS_OVER)
    parts = prepare(args)

    print("\n1  A reward model learns from pairs of answers")
    training = ["--minutes", args.limits["reward_model"], "--learning-rate", 2e-5, "--seed", args.seed]
    if not reward_model.exists():
        files = ["--trunk", args.model, "--pairs", out / "reward_model.jsonl", "--out", reward_model]
        script(HERE / "train_reward_model.py", *files, *training)

    print("\n2  guerdon serves it, and REINFORCE trains the chat model against it")
    with serving("serve", reward_model, log=out / "reward_server.log") as url:
        urls = ["--remote-rm.reward-model.urls", url]
        guerdon("reinforce", HERE / "reinforce.yaml", *run_flags(args, "reinforce"), *urls, accepted=ended)

        print("\n3  So does PPO, with a critic that starts as the reward model")
        learning = ["--checkpoint-dir", out / "critic", "--learning-rate", 1e-5, "--global-batch-size", 32]
        with serving("serve-critic", reward_model, *learning, log=out / "critic_server.log") as critic:
            urls = ["--remote-critic-rm.reward-model.urls", url, "--remote-critic-rm.critic.url", critic]
            guerdon("ppo", HERE / "ppo.yaml", *run_flags(args, "ppo"), *urls, accepted=ended)

        print("\n4  Before and after, on held-out prompts")
        for name in (names := ("before", "reinforce", "ppo")):
            script(HERE / "respond.py", *respond_flags(args, name))
        with RewardClient(url) as client:
            judge = Judge(parts["judge"])
            accuracy = rate_accuracy(client, judge, parts["held_out"])
            written = {name: read_rows(out / f"responses_{name}.jsonl") for name in names}
            figures = compare(client, judge, written)
    report(out, accuracy, figures, written, time.monotonic() - began)


if __name__ == "__main__":
    main()
