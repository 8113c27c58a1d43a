"""Reads prompts from files and data sets, and checks them before a model is loaded; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guerdon.client.jsonl import read_rows
from guerdon.core import Message
from guerdon.errors import ConfigError, InvalidRequest, StartError, first_line, install_command
from guerdon.messages import plain
from guerdon.settings.actors import DataConfig, is_path


def check_prompts(config: DataConfig) -> None:
    """Reads all prompts of files and folders; raises ConfigError that names the source and the row which is wrong.

    Independent of the policy's tokenizer: chat template and prompt lengths come later. So is a data set of the hub,
    which may take long to download.
    """
    num_training = _count_prompts(config, config.prompts, config.split)
    if config.validation is not None:
        _count_prompts(config, config.validation, config.validation_split or config.split)
    elif num_training is not None:
        num_validation = min(config.num_validation, num_training)
        check_num_prompts(config, num_training - num_validation, num_validation)


def _count_prompts(config: DataConfig, source: str, split: str) -> int | None:
    """Returns the number of prompts; None for a data set of the hub."""
    if not (Path(source).exists() or is_path(source)):
        return None
    return sum(1 for _ in read_prompts(source, split, config.field, is_chat=config.template))


def check_num_prompts(config: DataConfig, num_training: int, num_validation: int, num_skipped: int = 0) -> None:
    """Raises ConfigError if no prompt is left to train on."""
    if num_training == 0:
        raise ConfigError(
            f"{config.prompts} has no prompt to train on, beside {num_validation} to validate on and "
            f"{num_skipped} too long ones",
            "give more prompts, or lower data.num_validation",
        )


def read_prompts(source: str, split: str, field: str, *, is_chat: bool) -> Iterator[tuple[int, str | list[Message]]]:
    """Yields each row's number, from 0, and its prompt: text, or messages.

    With `is_chat`, text becomes a user's message. Raises ConfigError if the source cannot be read, or naming the row
    which is wrong.
    """
    path = Path(source)
    if path.is_file() and path.suffix == ".parquet":
        rows = _parquet_rows(path)
    elif path.is_file():
        rows = _json_rows(path)
    else:
        rows = _data_set_rows(source, split)
    for number, row in enumerate(rows):
        if field not in row:
            raise bad_row(source, number, f"it has no field {field}, only {', '.join(map(str, row))}")
        value = row[field]
        if isinstance(value, str):
            yield number, [{"role": "user", "content": value}] if is_chat else value
            continue
        if not isinstance(value, list):
            raise bad_row(source, number, f"{field} is neither text nor a list of messages")
        try:
            plain(value)
        except InvalidRequest as e:
            raise bad_row(source, number, str(e)) from e
        yield number, value


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from (row for _, row in read_rows(path))
    except StartError as e:
        raise ConfigError(str(e), "each line must be a JSON object, and a .gz file complete") from e


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise _needs_data_extra(path) from e
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as e:
        raise ConfigError(f"cannot read {path}: {e}", "check that the Parquet file is complete") from e


def _data_set_rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a folder that `datasets` saved or reads, or of a data set of the hub."""
    path = Path(source)
    if not path.is_dir() and is_path(source):
        raise ConfigError(f"{source} does not exist", "name a JSONL (.gz) or Parquet file, a folder, or a hub id")
    try:
        import datasets
    except ImportError as e:
        raise _needs_data_extra(source) from e
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(source)
            data = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            data = datasets.load_dataset(source, split=split)
    # datasets raises anything, depending on what the folder or the hub has.
    except Exception as e:
        raise ConfigError(
            f"cannot load the data set {source}, split {split}: {first_line(e)}", "check data.prompts and data.split"
        ) from e
    yield from data


def _needs_data_extra(source: str | Path) -> ConfigError:
    return ConfigError(f"{source} needs the library datasets", install_command("data"))


def bad_row(source: str, row: int, why: str) -> ConfigError:
    """Returns the error of a source's row, counted from 0."""
    return ConfigError(f"{source}, row {row} (from 0): {why}", "correct the row, or name another data.field")
