"""`guerdon check`: finds the form of a server of rewards or log-probs, and tries it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import quote

import httpx
import orjson

from guerdon.cli.check_forms import FORMS, NAMES, KServe, read_form
from guerdon.cli.check_subject import LEAST_LENGTH, FellShort, NoReply, NotApplicable, Subject, verify
from guerdon.cli.check_trials import TRIALS
from guerdon.cli.console import Style, coloured
from guerdon.client.addresses import Address, addresses
from guerdon.client.calls import ModelSignature
from guerdon.client.http_transport import fetch_json
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest, StartError, require_modules
from guerdon.settings.access import strip_credentials

Outcome = Literal["held", "fell short", "not applicable"]

_STYLES: dict[Outcome, Style] = {"held": "green", "fell short": "red", "not applicable": "faint"}

_WAITS_S = (0.2, 1.0, 5.0)
"""Seconds before a request that met a busy server is sent again."""


@dataclass(frozen=True)
class TriedTrap:
    """The outcome of one trial, and why in one line."""

    name: str
    asks: str
    outcome: Outcome
    why: str

    def __str__(self) -> str:
        outcome = coloured(f"{self.outcome:<14}", _STYLES[self.outcome], sys.stdout)
        return f"{outcome}  {self.name:<11}  {self.why}"


def run(probe: Subject) -> Iterator[TriedTrap]:
    """Yields each trial's outcome as it ends; if nothing is answered, the others are not applicable."""
    has_answers = True
    for one in TRIALS:
        outcome: Outcome = "held"
        try:
            if not has_answers:
                raise NotApplicable("the server answers nothing to compare with")
            why = one.run(probe)
        except FellShort as e:
            outcome, why = "fell short", str(e)
            has_answers = one.name != TRIALS[0].name
        except NotApplicable as e:
            outcome, why = "not applicable", str(e)
        yield TriedTrap(one.name, one.asks, outcome, why)


def find(url: str, form: str | None, model: str | None, **settings: Any) -> Subject:
    """Returns the server as it is asked in the first form that it answers, or in `form`, a name or a file.

    Raises StartError if it cannot be asked.
    """
    try:
        (address,) = addresses(url, None)
    except InvalidRequest as e:
        raise ConfigError(str(e), "give the server's http:// or https:// URL") from e
    if address.is_grpc:
        raise ConfigError(f"{address.url} is gRPC, and trials go over HTTP", "give the server's http:// URL")
    if form is not None and form not in NAMES and not os.path.isfile(form):
        raise ConfigError(f"no form {form}", f"give a file, or one of {', '.join(NAMES)}")
    numbers = (settings["timeout_s"], settings["tolerance"], settings["max_length"] or 1)
    if not all(0 < number < 1e9 for number in numbers):  # neither NaN nor infinite
        raise ConfigError("--timeout, --tolerance or --max-length is not above 0", "give numbers above 0")
    try:
        httpx.get(address.url, headers=address.headers, timeout=5.0, verify=verify(address))
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise StartError(f"{address.url} gave no answer: {e or type(e).__name__}", "check host, port and scheme") from e
    name, length, of_all = describe(address, model)
    max_length = settings.pop("max_length")
    tried = [found for found in FORMS if form in (None, found.name)]
    if form is not None and os.path.isfile(form):
        tried = [read_form(form)]
    if form in (None, "kserve", "trlx"):
        with contextlib.suppress(GuerdonError):
            metadata = fetch_json(address, f"/v2/models/{quote(name, safe='')}", dict)
            tried.insert(0, KServe.of(ModelSignature.from_metadata(metadata), form or "kserve"))
    if model is not None:
        tried = [one for one in tried if one.names_model]
        if form is not None and not tried:
            raise ConfigError(f"requests name no model in the form {form}", "leave --name out")
    said = []
    for one in tried:
        limit = max_length or (length if one.names_model else of_all)
        probe = Subject(address, one, name, max_length=limit, **settings)
        for kind in one.takes():
            probe.kinds.append(kind)
            try:
                probe.numbers([probe.sample(8, 0, kind)], kind)
            except NoReply as e:  # the other forms would wait as long
                raise StartError(
                    f"{address.url} left a request of the form {one.name} open: {e}",
                    "name its --form, or raise --timeout",
                ) from e
            except FellShort as e:
                said.append(f"{one.name}: {e}")
                probe.kinds.remove(kind)
        if probe.kinds:
            probe.waits_s = _WAITS_S
            return probe
    locked = [why for why in said if ": 401" in why or ": 403" in why]
    known = [why for why in said if ": 404" not in why and ": 405" not in why]
    what = [*locked, *known, *said][0]
    raise StartError(
        f"{address.url} answers no {form or 'known form'} ({what})", "name its --form, and its model by --name"
    )


def describe(address: Address, model: str | None) -> tuple[str, int | None, int | None]:
    """Returns the model's name, by default the first that is listed, its longest sequence, and that of every model.

    The lengths are None if the server does not state them, the last also if the models' differ.
    """
    listed: list[Any] = []
    with contextlib.suppress(GuerdonError):
        listed = fetch_json(address, "/v1/models", dict).get("data") or []
    lengths = {}
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict):
            length = entry.get("max_model_len")
            lengths[str(entry.get("id"))] = length if isinstance(length, int) else None
    of_all = next(iter(lengths.values())) if len(set(lengths.values())) == 1 else None
    if lengths and (model is None or model in lengths):
        name = model or next(iter(lengths))
        return name, lengths[name], of_all
    if model is None:
        with contextlib.suppress(GuerdonError, KeyError, IndexError, TypeError):
            model = fetch_json(address, "/v2/repository/index", list, method="POST")[0]["name"]
    return model or "reward_model", None, of_all


def check(args: Any) -> int:
    """Runs the command: prints a row as each trial ends, or JSON; returns how many fell short."""
    tell = sys.stderr if args.json else sys.stdout
    print(f"checking {strip_credentials(args.URL)}", file=tell, flush=True)
    if args.reference is not None:
        require_modules("torch", "transformers", extra="server")
    settings = {"timeout_s": args.timeout, "tolerance": args.tolerance, "max_length": args.max_length}
    probe = find(args.URL, args.form, args.name, **settings)
    if args.reference is not None and probe.form.gives != "labels":
        print(f"loading {args.reference}", file=tell, flush=True)
        from guerdon.cli.check_reference import Reference

        probe.reference = Reference(args.reference, probe.form.gives)
        probe.max_length = probe.max_length or probe.reference.max_length
    if (probe.max_length or LEAST_LENGTH) < LEAST_LENGTH:
        raise StartError(
            f"{probe.model} takes {probe.max_length} tokens, and the trials need {LEAST_LENGTH}",
            "ask a model that takes more; --max-length says so if the server does not",
        )
    about: dict[str, Any] = {"url": probe.address.url, "form": probe.form.name, "samples": probe.kinds}
    about["model"] = probe.model if probe.form.names_model else None
    model = f", model {probe.model}" if about["model"] else ""
    print(f"form {probe.form.name}{model}, samples as {' and '.join(probe.kinds)}\n", file=tell, flush=True)
    rows = []
    for row in run(probe):
        print(row, file=tell, flush=True)
        rows.append(row)
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in _STYLES}
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), file=tell)
    if args.json:
        told = about | {"faults": counts["fell short"], "trials": [asdict(row) for row in rows]}
        sys.stdout.write(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
    return counts["fell short"]
