"""Trains small models on a file of reviews, and the language model by REINFORCE to write positive ones."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from task import arguments, conclude, flags, prepare  # noqa: E402

from serving import guerdon, serving  # noqa: E402


def main() -> None:
    args = arguments(__doc__, out="out/movie_reviews", steps=50)
    judge, held_out = prepare(args)
    run = args.out / "reinforce"

    print("\n2  guerdon serves the reward model")
    with serving("serve", args.out / "reward_model", log=args.out / "server.log") as url:
        print("\n3  REINFORCE trains the language model against it")
        guerdon("reinforce", HERE / "reinforce.yaml", *flags(args, run), "--remote-rm.reward-model.urls", url)
        conclude(args, run, judge, held_out, url)


if __name__ == "__main__":
    main()
