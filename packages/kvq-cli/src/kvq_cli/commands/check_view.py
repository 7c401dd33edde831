"""The record of `kvq check` for people."""

from __future__ import annotations

from typing import Any

from kvq_cli.commands.screen import Screen, framed

Record = dict[str, Any]


def show(screen: Screen, record: Record) -> None:
    """The machine, a row a format, and why something was not tried."""
    screen.show(framed("kvq check", _machine(record)))
    ops = list(record["formats"][0]["ops"])
    screen.table(
        f"{record['shape']}, pages of {record['page_tokens']} tokens, {record['dtype']}",
        ["format", *ops],
        [
            [row["format"], *(_cell(found) for found in row["ops"].values())]
            for row in record["formats"]
        ],
    )
    for reason in _reasons(record):
        screen.say(f"not tried: {reason}")
    for backend, counted in record["launches"].items():
        launches = ", ".join(f"{op} {count}" for op, count in counted.items())
        screen.say(f"launches of {backend}: {launches}")
    if record["agrees"]:
        screen.say("all that was tried agrees with the formats' definition")


def show_model(screen: Screen, record: Record) -> None:
    """The machine, and a row for each kernel that serving the model runs."""
    screen.show(framed(f"kvq check {record['model']}", _machine(record)))
    screen.table(
        f"{record['model']}, {record['dtype']}, prefill reads {record['prefill_reads']}",
        ["op", "backend", "format", "layer", "result"],
        [
            [each["op"], each["backend"], each["format"], each["layer"], _result(each)]
            for each in record["kernels"]
        ],
    )
    for note in record["notes"]:
        screen.say(f"note: {note}")
    if record["agrees"]:
        screen.say(
            f"all {len(record['kernels'])} kernels agree with the formats' definition, in "
            f"{record['seconds']:.1f} s"
        )


def _machine(record: Record) -> list[tuple[str, str]]:
    device = record["device"]
    capability = device["compute_capability"]
    return [
        ("versions", ", ".join(f"{name} {v}" for name, v in record["versions"].items())),
        (device["type"], device["name"]),
        *([("compute capability", capability)] if capability else []),
        *(
            (name, facts["unavailable"] or f"runs on {device['type']}")
            for name, facts in record["backends"].items()
        ),
    ]


def _cell(found: Record) -> str:
    """The backend, and how it did: rows that are wrong, or the relative error of attention."""
    if found["backend"] is None:
        return "—"
    return f"{found['backend']} {_result(found)}".rstrip()


def _result(found: Record) -> str:
    """Of each of its routes, if it has several: those that cannot be taken are left out."""
    if "routes" in found:
        routes = found["routes"].items()
        return ", ".join(f"{name} {_result(own)}" for name, own in routes if not own["refused"])
    if found["failed"]:
        return "failed"
    if "error" in found:
        error = found["error"]
        return "not finite" if error is None else f"{error:.0e}"
    if "wrong_rows" in found:
        wrong = found["wrong_rows"]
        return f"{wrong} wrong" if wrong else "exact"
    return ""


def _reasons(record: Record) -> list[str]:
    """Why ops were refused, a line a reason; formats are named where it is not all of them."""
    formats: dict[str, dict[str, None]] = {}
    ops: dict[str, dict[str, None]] = {}
    for row in record["formats"]:
        for op, found in row["ops"].items():
            if found["refused"]:
                formats.setdefault(found["refused"], {})[row["format"]] = None
                ops.setdefault(found["refused"], {})[op] = None
    return [
        ", ".join(refused)
        + (f" of {', '.join(formats[why])}" if len(formats[why]) < len(record["formats"]) else "")
        + f": {why}"
        for why, refused in ops.items()
    ]
