"""PPO with a critic that learns on a server; the task, models and judge of ../movie_reviews."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.with_name("movie_reviews"))]

from task import arguments, conclude, flags, prepare  # noqa: E402

from serving import guerdon, serving  # noqa: E402


def main() -> None:
    args = arguments(__doc__, out="out/ppo", steps=50)
    judge, held_out = prepare(args)
    reward_model, settings, run = args.out / "reward_model", HERE / "ppo.yaml", args.out / "ppo"

    print("\n2  One server for the reward model, one for a critic that starts as it")
    learning = ["--checkpoint-dir", args.out / "critic", "--learning-rate", 1e-3, "--global-batch-size", 128]
    with (
        serving("serve", reward_model, log=args.out / "reward_server.log") as reward_url,
        serving("serve-critic", reward_model, *learning, log=args.out / "critic_server.log") as critic_url,
    ):
        print("\n3  PPO trains the language model against both")
        urls = ["--remote-critic-rm.critic.url", critic_url, "--remote-critic-rm.reward-model.urls", reward_url]
        guerdon("ppo", settings, *flags(args, run), *urls)
        conclude(args, run, judge, held_out, reward_url)


if __name__ == "__main__":
    main()
