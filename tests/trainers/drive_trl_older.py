"""An older TRL's client of a teacher: `drive_trl_older.py FOLDER URL ROWS`, a JSON file of [tokens, prompt length].

Prints {"binary": {...}, "lists": {...}}, what it returns in its two formats; the first in chunks of one row.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(folder: str, url: str, rows: list[tuple[list[int], int]]) -> dict[str, Any]:
    sys.path.insert(0, folder)
    from trl.generation import vllm_client

    assert vllm_client.__file__.startswith(folder)
    vllm_client.is_vllm_available = lambda: True  # it is only asked for, and not used
    client = vllm_client.VLLMClient(base_url=url)
    sequences, lengths = [row for row, _ in rows], [length for _, length in rows]
    return {
        "binary": client.get_sequence_logprobs(sequences, lengths, top_logprobs=5, chunk_size=1),
        "lists": client.get_sequence_logprobs(sequences, lengths, top_logprobs=5, use_binary=False),
    }


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        print(json.dumps(main(sys.argv[1], sys.argv[2], json.load(file))))
