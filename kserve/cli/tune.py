"""`kserve tune`: finds the best values of a kernel's knobs on this device, and keeps them for everybody who has the same."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import kserve
from kserve import catalog, protocol
from kserve.cli.heat import heat_map, rows_table
from kserve.cli.show import say
from kserve.cli.wishes import assignment, spec_of
from kserve.client.choice import device_for
from kserve.client.connection import Connection
from kserve.client.direct import Wanted, kernel_of, resolve
from kserve.client.loader import driver
from kserve.client.resolve import Answer, ask_each
from kserve.config import Settings, environment_variables, load_settings
from kserve.definition import Entry
from kserve.errors import STATUS, InvalidSpec, KserveError, LoadError, NotBuilt, RequestError, UnsupportedTarget, closest
from kserve.knobs import overrides_in, shown
from kserve.measure.bench import Inputs, bench_for, inputs_of
from kserve.measure.configurations import enumerate_all
from kserve.measure.launch_once import example_of
from kserve.measure.sweep import Row, Subject, Swept, carry_over, compile_all, floor_us, ranked, time_new
from kserve.target import parse_target
from kserve.tuning import Device, Tuning, bucket_of, tuning_from_json, tuning_name


def add_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("name", help="a kernel")
    parser.add_argument("--set", action="append", default=[], metavar="AXIS=VALUE", help="a value for an axis; may be repeated")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME=N", help="a size it is launched on; may be repeated"
    )
    parser.add_argument(
        "--any-size", action="store_true", help="keep the winner for every size, not for those near --shape only"
    )
    parser.add_argument(
        "--knob", action="append", default=[], metavar="NAME=N,…", help="values to try, in place of kernel.toml's"
    )
    parser.add_argument("--target", help="such as cuda:sm_90; left out, the current device's")
    parser.add_argument("--inputs", metavar="FILE.py:FUNCTION", help="makes the launch arguments: (spec, device, **sizes)")
    parser.add_argument("--tolerance", type=float, help="of two right results, over the largest value; left out, the dtype's")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="how long to wait for the builds")
    parser.add_argument("--dry-run", action="store_true", help="list the configurations; build and time nothing")
    parser.add_argument("--forget", action="store_true", help="remove the tuning that is stored for this device and shape")


class _Wish(NamedTuple):
    """What is tuned: the kernel as a client asks for it, the configurations of it, the bucket the winner will serve."""

    wanted: Wanted
    subject: Subject
    sizes: dict[str, int]
    bucket: dict[str, int]


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status is the driver's where there was no device to time anything."""
    settings = load_settings()
    wish = _wish(arguments, settings)
    if arguments.dry_run:
        rows = [Row(knobs, "compiled", "not built") for knobs in wish.subject.configurations.all]
        return _show(arguments, wish, Swept(rows), device=None, n_bytes=None)
    device = device_for(wish.wanted.target)
    rows, built = compile_all(wish.subject, lambda asked: _build(wish.wanted, asked, arguments.timeout))
    base = next((answer.base for answer in built.values()), "")
    before = _stored(settings, base, device, wish.bucket)
    if arguments.forget:
        return _forget(arguments, settings, before)
    if device is None or not built:
        return _show(arguments, wish, Swept(rows), device=None, n_bytes=None)
    inputs = inputs_of(wish.wanted.name, arguments.inputs)
    swept = _swept(arguments, wish, rows, built, before=before, inputs=inputs)
    if swept.winner is not None and swept.n_timed:
        _keep(settings, wish, swept, device=device, answer=built[swept.winner.label])
    n_bytes = inputs.n_bytes(wish.subject.spec, {**inputs.sizes, **wish.sizes}) if inputs.n_bytes else None
    return _show(arguments, wish, swept, device=device, n_bytes=n_bytes)


def _wish(arguments: argparse.Namespace, settings: Settings) -> _Wish:
    found = catalog.find(arguments.name, settings)
    definition = catalog.definition_of(found.folder)
    entry = definition.entries[arguments.name]
    target = arguments.target or _current_target(arguments.name)
    spec = spec_of(arguments, definition)
    knobs = dict(_numbers("--knob", text) for text in arguments.knob)
    sizes = {name: values[0] for name, values in (_numbers("--shape", text) for text in arguments.shape)}
    of_kernel = _check_sizes(entry, sizes, inputs=arguments.inputs)
    exact = definition.resolve_target(entry, parse_target(target))
    configurations = enumerate_all(definition, entry, spec, knobs)
    subject = Subject(definition, entry, definition.specialise(entry, spec), exact, configurations)
    return _Wish(Wanted(entry.name, target, spec), subject, sizes, {} if arguments.any_size else bucket_of(of_kernel))


def _check_sizes(entry: Entry, sizes: Mapping[str, int], *, inputs: str | None) -> dict[str, int]:
    """Those of the sizes that the kernel can be asked by; the others shape the inputs. Raises: InvalidSpec for another name."""
    known = example_of(entry.name) if inputs is None else None
    for name in sizes:
        if known is None:
            entry.check_size(name)
        elif name not in known.sizes:
            raise InvalidSpec(f"the inputs of {entry.name} have no size {name!r}: {closest(name, [*known.sizes])}")
    return {name: value for name, value in sizes.items() if name in entry.size_names}


def _current_target(name: str) -> str:
    try:
        found = driver()
        return str(found.target_of(found.current_device()))
    except LoadError as error:
        raise UnsupportedTarget(f"{name} has no target: {error.message}", hint="--target cuda:sm_90") from None


def _numbers(flag: str, text: str) -> tuple[str, list[int]]:
    """`BLOCK=64,128`. Raises: RequestError."""
    name, values = assignment(flag, text, "NAME=N")
    try:
        return name, [int(value) for value in values.split(",")]
    except ValueError:
        raise RequestError(f"{flag} {text!r} cannot be read", facts={"allowed": f"{flag} NAME=N"}) from None


def _build(wanted: Wanted, asked: Sequence[Mapping[str, int]], timeout_s: float) -> list[Answer | KserveError]:
    """Every configuration in one request: the service builds as many at once as it has cores."""
    deadline = time.monotonic() + timeout_s
    return ask_each([wanted._replace(knobs=knobs) for knobs in asked], deadline=deadline) if asked else []


def _stored(settings: Settings, base: str, device: Device | None, bucket: dict[str, int]) -> Tuning | None:
    if device is None or not base:
        return None
    with contextlib.suppress(NotBuilt):
        plain = _call(settings, "GET", f"{protocol.TUNINGS}/{tuning_name(base, device, bucket)}")
        return tuning_from_json({field: value for field, value in plain.items() if field != "name"})
    return None


def _swept(
    arguments: argparse.Namespace,
    wish: _Wish,
    rows: list[Row],
    built: dict[str, Answer],
    *,
    before: Tuning | None,
    inputs: Inputs,
) -> Swept:
    rows = carry_over(rows, before.rows if before else [])
    if not any(row.state == "compiled" for row in rows):
        return Swept(ranked(rows))
    first = next(iter(built.values())).artifacts[0]
    bench = bench_for(inputs, first, spec=wish.subject.spec, sizes=wish.sizes, tolerance=arguments.tolerance)
    return time_new(rows, built, bench, lambda answer: kernel_of(answer.artifacts, origin=answer.origin, began=0.0, load=True))


def _keep(settings: Settings, wish: _Wish, swept: Swept, *, device: Device, answer: Answer) -> None:
    """Store the winner with its evidence, and have it built as everybody will ask for it."""
    assert swept.winner is not None
    components = answer.artifacts[0].manifest.components
    tuning = Tuning(
        base=answer.base,
        kernel=wish.wanted.name,
        spec={name: wish.subject.spec[name] for name in wish.subject.definition.axes},
        target=str(wish.subject.target),
        device=device,
        sizes=wish.bucket,
        knobs=swept.winner.knobs,
        rows=[{**row._asdict(), "resources": dict(row.resources)} for row in swept.rows],
        toolchain=f"{components['toolchain.name']} {components['toolchain.version']}",
        version=kserve.__version__,
        created_at=time.time(),
    )
    _call(settings, "POST", protocol.TUNINGS, tuning.to_json())
    resolve([wish.wanted._replace(sizes=wish.bucket)], load=False, locked=False)


def _forget(arguments: argparse.Namespace, settings: Settings, before: Tuning | None) -> int:
    if before is not None:
        _call(settings, "POST", f"{protocol.TUNINGS}/{before.name}/remove")
    text = f"forgot {shown(before.knobs)} of {before.kernel}" if before else "no such tuning is stored"
    say(json.dumps({"forgotten": before and before.name}) if arguments.json else text)
    return 0


def _call(settings: Settings, method: str, path: str, body: object = None) -> Any:
    with contextlib.closing(Connection(settings)) as connection:
        return connection.call(method, path, body, start=True)


def _show(arguments: argparse.Namespace, wish: _Wish, swept: Swept, *, device: Device | None, n_bytes: int | None) -> int:
    floor = floor_us(swept, n_bytes)
    is_untimed = device is None and not arguments.dry_run
    plain = {
        "name": wish.wanted.name,
        "spec": wish.subject.spec,
        "target": str(wish.subject.target),
        "device": device and device._asdict(),
        "sizes": wish.sizes,
        "bucket": wish.bucket,
        "n_excluded": wish.subject.configurations.n_excluded,
        "n_timed": swept.n_timed,
        "stop": swept.stop,
        "winner": swept.winner.knobs if swept.winner else None,
        "n_bytes": n_bytes,
        "copy_gb_s": swept.copy_gb_s,
        "floor_us": floor,
        "rows": [{**row._asdict(), "resources": dict(row.resources), "plateau": row.is_on_plateau} for row in swept.rows],
    }
    if arguments.json:
        say(json.dumps(plain, indent=2))
    else:
        say(f"{wish.wanted.name} for {wish.subject.target} on {device or 'no device'}: {len(swept.rows)} configurations")
        say(rows_table(swept.rows, n_bytes=n_bytes))
        for line in (*heat_map(swept.rows), *_remarks(arguments, wish, swept, floor=floor, is_untimed=is_untimed)):
            say(line)
    return STATUS["load-failed"][1] if is_untimed else 0


def _remarks(arguments: argparse.Namespace, wish: _Wish, swept: Swept, *, floor: float | None, is_untimed: bool) -> list[str]:
    """What there is to say besides the table."""
    found = []
    if n_excluded := wish.subject.configurations.n_excluded:
        found.append(f"{n_excluded} combinations are excluded by the constraints of kernel.toml")
    if is_untimed:
        found.append(f"nothing was timed: no device here runs {wish.subject.target}")
    if swept.winner is not None:
        word = f"timed {swept.n_timed} ({swept.stop})" if swept.n_timed else "nothing was new, and nothing was timed"
        found.append(f"winner: {shown(swept.winner.knobs)}; {word}")
    if floor is not None and swept.winner is not None and swept.winner.us is not None:
        found.append(f"floor: {floor:.2f} us are not the bytes at the speed of a copy, {swept.copy_gb_s:.0f} GB/s")
        timed = [row for row in swept.rows if row.state in ("timed", "loser")]
        if floor > swept.winner.us[0] / 3 and 2 * sum(row.is_on_plateau for row in timed) > len(timed):
            found.append("most configurations are as good: the launch is not what limits this kernel")
    overrides = overrides_in(catalog.find(wish.wanted.name, load_settings()).variables, environment_variables())
    if overrides and not arguments.dry_run:
        found.append(f"{', '.join(one.variable for one in overrides.values())} overrides the tuning in this shell")
    return found
