"""Trains a critic through `critic_train` to predict a movie review's label from its beginning.

  python benchmarks/critic_learns.py FILE.jsonl[.gz]       lines of {"text", "label"}; curves and a plot under --out

The critic starts from random weights. The return at every token is the review's label, 0 or 1, like a reward at the end
of an undiscounted episode. Each request has its own `prev_values` from `critic_infer`, as in PPO. The server keeps the
checkpoint that is best on the validation reviews; it is loaded at the end, and measured on test reviews that played no
part in the choice.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from critic_server import serving
from guerdon import CriticClient
from report import machine

VOCAB_SIZE, MAX_LENGTH = 6000, 96
SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
SHOWN = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/critic-learns"), help="folder of the model and results")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--request", type=int, default=512, help="reviews per train request (default: 512)")
    parser.add_argument(
        "--held-out", type=int, default=1000, help="reviews for validation, and as many for test (default: 1000)"
    )
    parser.add_argument("--port", type=int, default=5556, help="the server's port (default: 5556)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    reviews = read(args.data)
    training = reviews[2 * args.held_out :]
    tokenizer = make_model(args.out / "model", [text for text, _ in training])
    train = encode(tokenizer, training)
    validation = encode(tokenizer, reviews[: args.held_out])
    test = encode(tokenizer, reviews[args.held_out : 2 * args.held_out])
    steps = args.epochs * len(train[0]) // 64
    flags = ["--checkpoint-dir", str(args.out / f"checkpoints-{time.time_ns()}"), "--keep-best", "validation"]
    flags += ["--learning-rate", str(args.learning_rate), "--weight-decay", str(args.weight_decay)]
    flags += ["--lr-schedule", "linear", "--warmup-steps", str(steps // 20), "--total-steps", str(steps)]
    with serving(args.out / "model", args.port, args.out / "server.log", *flags) as client:
        curve = [measure(client, validation)]
        for epoch in range(args.epochs):
            curve.append(learn(client, train, epoch, args) | measure(client, validation))
            saved = client.save(metrics={"validation": curve[-1]["explained_variance"]})
            print(json.dumps(curve[-1] | {"checkpoint": saved.name}))
        best = max(client.state().checkpoints, key=lambda c: c.metrics["validation"])
        client.load(best.name)
        assert measure(client, validation)["explained_variance"] == best.metrics["validation"]
        tested, shown = measure(client, test) | {"step": best.step}, examples(client, tokenizer, test)
    result = {"about": machine(), "epochs": curve, "test": tested, "shown": shown}
    (args.out / "critic_learns.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({"test": tested} | result["about"]))
    plot(result, args.out / "critic_learns.png")


def read(path: Path) -> list[tuple[str, int]]:
    """Returns (text, label) of every line, shuffled."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [(rows[i]["text"], rows[i]["label"]) for i in np.random.default_rng(0).permutation(len(rows))]


def make_model(folder: Path, texts: list[str]) -> PreTrainedTokenizerFast:
    """Saves a random reward model with a tokenizer of the words in `texts`."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<unk>", "</s>"]
    made.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=MAX_LENGTH
    )
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LENGTH, num_labels=1, **ids, **SHAPE)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, reviews: list[tuple[str, int]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the ids of each review, with EOS at the end, and the labels."""
    rows = [np.array([*tokenizer(text)["input_ids"][: MAX_LENGTH - 1], 2]) for text, _ in reviews]
    return rows, np.array([label for _, label in reviews], np.float32)


def targets(rows: list[np.ndarray], labels: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the returns and the mask of each row: the label at every token but the last, which precedes no action."""
    returns = [np.full(len(row) - 1, label, np.float32) for row, label in zip(rows, labels, strict=True)]
    return returns, [np.ones_like(r) for r in returns]


def learn(
    client: CriticClient, train: tuple[list[np.ndarray], np.ndarray], epoch: int, args: argparse.Namespace
) -> dict:
    """Makes one pass over the training reviews; returns means over its requests."""
    rows, labels = train
    order = np.random.default_rng(epoch + 1).permutation(len(rows))
    reports = []
    for start in tqdm(range(0, len(order), args.request), desc=f"epoch {epoch + 1}", leave=False):
        chosen = order[start : start + args.request]
        tokens = [rows[i] for i in chosen]
        returns, mask = targets(tokens, labels[chosen])
        previous = [values[:-1] for values in client.infer(tokens=tokens).values]
        reports.append(client.train(tokens, returns, previous, mask).result())
    return {
        "step": reports[-1].step,
        "loss": float(np.mean([r.loss for r in reports])),
        "training": float(np.mean([r.explained_variance for r in reports])),
    }


def measure(client: CriticClient, held_out: tuple[list[np.ndarray], np.ndarray]) -> dict:
    """Returns the explained variance of the returns at all tokens, by the server's validation, and at the last one."""
    rows, labels = held_out
    returns, mask = targets(rows, labels)
    values = client.infer(tokens=rows).values
    report = client.validate(rows, returns, [v[:-1] for v in values], mask)
    last = np.array([v[-2] for v in values])
    return {
        "explained_variance": report.explained_variance,
        "at_the_end": float(1 - np.var(labels - last) / np.var(labels)),
        "accuracy": float(np.mean((last > 0.5) == (labels > 0.5))),
    }


def examples(client: CriticClient, tokenizer: PreTrainedTokenizerFast, held_out: tuple[list, np.ndarray]) -> list[dict]:
    """Returns the value after each word of some held-out reviews: the first of each label with a readable length."""
    rows, labels = held_out
    fitting = [i for i, row in enumerate(rows) if 9 <= len(row) <= 16 and 1 not in row]
    chosen = [i for label in (1, 0) for i in [i for i in fitting if labels[i] == label][: SHOWN // 2]]
    values = client.infer(tokens=[rows[i] for i in chosen]).values
    return [
        {
            "words": [tokenizer.decode([token]) for token in rows[i][:-1]],
            "values": [float(x) for x in v[:-1]],
            "label": int(labels[i]),
        }
        for i, v in zip(chosen, values, strict=True)
    ]


def plot(result: dict, path: Path) -> None:
    """Draws the explained variance by epoch, and values along some held-out reviews."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    epochs, shown = result["epochs"], result["shown"]
    figure = plt.figure(figsize=(11, 4.6 + 1.1 * len(shown)))
    grid = figure.add_gridspec(1 + len(shown), 1, height_ratios=[4.2, *[1.0] * len(shown)], hspace=1.2)
    axis = figure.add_subplot(grid[0])
    for key, label, colour in (
        ("training", "training, all tokens", "#b5b5b5"),
        ("explained_variance", "validation, all tokens", "#2a6f97"),
        ("at_the_end", "validation, at the last word", "#d1495b"),
    ):
        points = [(i, e[key]) for i, e in enumerate(epochs) if key in e]
        axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=label)
    best = next(i for i, e in enumerate(epochs) if e.get("step") == result["test"]["step"])
    axis.plot(best, result["test"]["explained_variance"], "*", color="#2a6f97", markersize=14,
              label=f"test, all tokens: {result['test']['explained_variance']:.3f}")  # fmt: skip
    axis.set_ylim(bottom=min(0.0, max(-0.2, min(e["explained_variance"] for e in epochs))))
    axis.set_xticks(range(len(epochs)))
    axis.set_xlabel("epoch")
    axis.set_ylabel("explained variance")
    axis.set_title("A critic that learns only through critic_train", loc="left")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.spines[["top", "right"]].set_visible(False)
    for i, example in enumerate(shown):
        axis = figure.add_subplot(grid[1 + i])
        places = range(len(example["words"]))
        colours = ["#2a6f97" if v > 0.5 else "#d1495b" for v in example["values"]]
        axis.bar(places, [v - 0.5 for v in example["values"]], bottom=0.5, color=colours)
        axis.axhline(0.5, color="#555555", linewidth=0.6)
        axis.set_ylim(0, 1)
        axis.set_xticks(places, example["words"], rotation=20, ha="right", fontsize=8)
        axis.set_title(f"value after each word; the review is {('negative', 'positive')[example['label']]}",
                       loc="left", fontsize=9)  # fmt: skip
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
