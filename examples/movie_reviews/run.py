"""Small models from a file of reviews, and REINFORCE that makes the language model write positive ones."""

from pathlib import Path

from serving import guerdon, serving
from task import arguments, conclude, flags, prepare

SETTINGS = Path(__file__).with_name("reinforce.yaml")


def main() -> None:
    args = arguments(__doc__, out="out/movie_reviews", steps=50)
    judge, held_out = prepare(args)
    run = args.out / "reinforce"

    print("\n2  The reward model, served")
    with serving("serve", args.out / "reward_model", log=args.out / "server.log") as url:
        print("\n3  REINFORCE against it")
        guerdon("reinforce", SETTINGS, *flags(args, run), "--remote-rm.reward-model.urls", url)
        conclude(args, run, judge, held_out, url)


if __name__ == "__main__":
    main()
