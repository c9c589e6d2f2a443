"""The units of an extension, planned: each is a build of its own, so that an edit of one compiles one."""

from __future__ import annotations

from kserve.build.extension_job import is_header_of, unit_job
from kserve.build.plan import Plan
from kserve.definition import EXTENSION
from kserve.key import build_key, canonical_json
from kserve.target import host
from kserve.toolchain.extension import codes_of

# The variant of a unit's entry begins so; its name is the extension's.
UNIT = "unit:"
# Components that a library has and a unit has not, or has as its own.
_OF_LIBRARY = ("option.", "main", "target", "source.", "spec.", "launch.", "include.")


def unit_plans(plan: Plan) -> list[Plan]:
    """The build of each unit of a library; none for anything else."""
    units = plan.job.options.get("units", []) if plan.job.language == EXTENSION and not plan.job.main else []
    return [_unit_plan(plan, unit, units) for unit in units]


def _unit_plan(plan: Plan, unit: str, units: list[str]) -> Plan:
    job = unit_job(plan.job, unit, codes=codes_of(plan.job), host=host())
    files = {name: digest for name, digest in plan.files.items() if is_header_of(unit, name, units)}
    components = {label: text for label, text in plan.components.items() if not label.startswith(_OF_LIBRARY)}
    components |= {"main": unit, "target": job.target}
    components |= {f"option.{name}": canonical_json(value) for name, value in job.options.items()}
    components |= {f"source.{name}": digest for name, digest in files.items()}
    return plan._replace(
        key=build_key(components), components=components, target=host(), variant=UNIT + unit, job=job, files=files
    )
