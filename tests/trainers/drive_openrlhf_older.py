"""An older OpenRLHF's request for rewards, for the samples of a JSON file.

    drive_openrlhf_older.py FOLDER URL SAMPLES

`remote_rm_fn_ray` is that release's, called without Ray's cluster. Prints {"rewards": [...]}.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, url: str, samples: list[dict[str, Any]]) -> list[float]:
    spec = importlib.util.spec_from_file_location("older", folder / "openrlhf/utils/remote_rm_utils.py")
    assert spec is not None and spec.loader is not None
    older = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    ask = older.remote_rm_fn_ray._function
    known = {
        "queries": [s["prompt"] + s["response"] for s in samples],
        "prompts": [s["prompt"] for s in samples],
        "labels": [s["label"] for s in samples],
    }
    told = ask(url, **{name: value for name, value in known.items() if name in inspect.signature(ask).parameters})
    rewards = told["rewards"] if isinstance(told, dict) else told
    return rewards if isinstance(rewards, list) else rewards.tolist()


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        print(json.dumps({"rewards": main(Path(sys.argv[1]), sys.argv[2], json.load(file))}))
