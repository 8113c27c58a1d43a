"""Compares all forms of attention over packed batches that this machine can run, alternating; medians.

  python benchmarks/attention.py                      heads of an 8B model, all loads, in the device's usual dtype
  python benchmarks/attention.py --dtype float32 --heads 6 --kv-heads 6 --size 64 --tokens 2048

Measures one layer's attention, without the model around it. A load is a batch of so many tokens: groups of a prompt and
its responses; the prompt is stored once and seen by the whole group (`guerdon.engine.packing`). The table:

  forward       milliseconds of the forward pass alone, as in serving
  both          milliseconds of forward and backward pass, as in training a critic
  output, slopes  relative RMS difference from by_segment in float64; slopes are the gradients
  picked        the form that guerdon takes (the order is in `guerdon.engine.attention.forms`)
  fastest       the form that it should take here, by the time of the named pass

If `picked` and `fastest` stand in lines that differ by more than a tenth, the order should change. Absolute times on a
busy machine mean little; the forms of one load alternate, so that they can be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.masking_utils import sliding_window_bidirectional_mask_function, sliding_window_causal_mask_function

from guerdon.engine.attention.forms import BY_SEGMENT, AttentionForm, Need, candidates, check_form, need_of
from guerdon.engine.attention.patterns import Pattern, cut, packed_mask
from guerdon.engine.packing import PackedBatch, pack
from report import machine

RESPONSE = 150
WINDOW = 128
LOADS = {
    f"prompts of {prompt} x {responses}{extra}": (prompt, responses, extra)
    for extra in ("", ", window", ", soft cap", ", encoder", ", encoder with window")
    for prompt in (100, 1000)
    for responses in ((1, 8, 32) if extra in ("", ", window") else (1,) if "encoder" in extra else (8,))
}
"""Prompt tokens, responses per prompt, and what the layer needs beyond causal attention."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="(default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", default="bfloat16" if cuda else "float32", help="default: bfloat16; float32 on a CPU"
    )
    parser.add_argument(
        "--tokens", type=int, default=16384 if cuda else 4096, help="tokens per batch; larger groups are skipped"
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads (default: 8)")
    parser.add_argument("--size", type=int, default=128, help="size of a head (default: 128)")
    parser.add_argument("--rounds", type=int, default=20 if cuda else 5, help="rounds over all forms of a load")
    parser.add_argument("--loads", default="", help="only loads whose name contains this")
    parser.add_argument("--forward-only", action="store_true", help="skip the backward pass")
    parser.add_argument("--out", type=Path, default=Path("out/bench-attention"), help="folder of the results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine() | {"device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU"}
    about |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__, "dtype": args.dtype}
    about["heads"] = f"{args.heads} over {args.kv_heads} of size {args.size}"
    loads = {}
    fitting = [name for name, (prompt, n, _) in LOADS.items() if prompt + n * RESPONSE <= args.tokens]
    for name in tqdm([name for name in fitting if args.loads in name], unit="load", leave=False):
        loads[name] = measure(*LOADS[name], args)
        (args.out / "attention.json").write_text(json.dumps({"about": about, "loads": loads}, indent=1))
    text = report(about, loads)
    (args.out / "attention.md").write_text(text)
    print(text)


def make_batch(prompt: int, responses: int, tokens: int, *, share: bool) -> PackedBatch:
    """Returns whole groups with about so many tokens in total."""
    random = np.random.default_rng(0)
    groups = max(1, tokens // ((prompt if share else prompt * responses) + responses * RESPONSE))
    rows = []
    for _ in range(groups):
        start = random.integers(0, 1000, prompt)
        lengths = random.integers(RESPONSE // 2, RESPONSE * 3 // 2, responses)
        rows += [np.concatenate([start, random.integers(0, 1000, n)]) for n in lengths]
    (batch,) = pack(rows, budget=10 * sum(map(len, rows)), share=share)
    return batch


def measure(prompt: int, responses: int, extra: str, args: argparse.Namespace) -> dict:
    """Returns milliseconds and differences of every form."""
    causal, softcap = "encoder" not in extra, 50.0 if "cap" in extra else None
    batch = make_batch(prompt, responses, args.tokens, share=causal)
    function = sliding_window_causal_mask_function if causal else sliding_window_bidirectional_mask_function
    mask = packed_mask(mask_function=function(WINDOW), local_size=WINDOW) if "window" in extra else None
    pattern, reach = cut(mask, causal, batch.max_length)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    shapes = [(1, batch.num_tokens, n, args.size) for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(x, generator=random).to(device, dtype).transpose(1, 2) for x in shapes]
    plain, slopes = (need_of(batch, *leaves(inputs[:3], x), causal, reach, softcap) for x in (False, True))
    forms = {
        form.name: form for form in candidates(plain) if form.supports(slopes)
    }  # or it has no gradients to compare
    refused = {}
    if device.type != "cpu":
        refused = {
            name: why for name, form in forms.items() if form is not BY_SEGMENT and (why := check_form(form, slopes))
        }
    running = {name: form for name, form in forms.items() if name not in refused}
    want = run(BY_SEGMENT, batch, [x.double() for x in inputs], slopes, pattern)
    found: dict = {"tokens": batch.num_tokens, "refused": refused, "forms": {}, "picked": next(iter(running))}
    for name, form in running.items():
        got = run(form, batch, inputs, slopes, pattern)
        apart = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
        found["forms"][name] = {"output": apart[0], "slopes": max(apart[1:])}
    del want, got
    for kind, need in ({"forward": plain} | ({} if args.forward_only else {"both": slopes})).items():
        times = alternate({n: (f, need) for n, f in running.items()}, batch, inputs, pattern, args.rounds)
        for name, milliseconds in times.items():
            found["forms"][name][kind] = milliseconds
    return found


def leaves(tensors: list[Tensor], differentiated: bool) -> list[Tensor]:
    return [x.detach().requires_grad_(differentiated) for x in tensors]


def run(
    form: AttentionForm, batch: PackedBatch, inputs: list[Tensor], need: Need, pattern: Pattern | None
) -> tuple[Tensor, ...]:
    """Returns the output, and the gradients if needed."""
    some = leaves(inputs[:3], need.gradients)
    with torch.set_grad_enabled(need.gradients):
        out = form.compute(batch, some[0], some[1], some[2], need.size**-0.5, need, pattern, None)
    return (out.detach(), *(torch.autograd.grad(out, some, inputs[3]) if need.gradients else ()))


def alternate(
    forms: dict[str, tuple[AttentionForm, Need]],
    batch: PackedBatch,
    inputs: list[Tensor],
    pattern: Pattern | None,
    rounds: int,
) -> dict[str, float]:
    """Returns the median milliseconds of each; the first round is not counted."""
    wait: Callable[[], None] = torch.cuda.synchronize if inputs[0].device.type == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 1):
        for name, (form, need) in forms.items():
            wait()
            begin = time.perf_counter()
            run(form, batch, inputs, need, pattern)
            wait()
            times[name].append(1000 * (time.perf_counter() - begin))
    return {name: statistics.median(some[1:]) for name, some in times.items()}


def report(about: dict[str, str], loads: dict[str, dict]) -> str:
    """Returns the table, one line per form and load."""
    lines = [", ".join(f"{name}: {what}" for name, what in about.items()), ""]
    lines += ["| load | tokens | form | forward ms | both ms | output | slopes | |", "| - " * 8 + "|"]
    for load, found in loads.items():
        forms = found["forms"]
        best = {kind: min(forms, key=lambda n: forms[n].get(kind, 0)) for kind in ("forward", "both")}
        for name, x in forms.items():
            notes = ["picked"] if name == found["picked"] and len(forms) > 1 else []
            fastest = [kind for kind, n in best.items() if n == name and kind in x and len(forms) > 1]
            notes += [f"fastest {' and '.join(fastest)}"] if fastest else []
            both = f"{x['both']:.2f}" if "both" in x else ""
            lines.append(
                f"| {load} | {found['tokens']:,} | {name} | {x['forward']:.2f} | {both} "
                f"| {x['output']:.1e} | {x['slopes']:.1e} | {', '.join(notes)} |"
            )
        lines += [f"| {load} | | {name} | refused: {why} | | | | |" for name, why in found["refused"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
