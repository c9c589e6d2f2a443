"""KernelDef: what a kernel folder defines, and what a spec and a target become under it. And the words of a kernel.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kserve.errors import InvalidDefinition, InvalidSpec, UnsupportedTarget, closest
from kserve.expression import Expression
from kserve.knobs import Knob, Values, settle
from kserve.spec import AXIS_TYPES, SCALARS, Axis, Spec, normalise_spec
from kserve.target import Target, host

# What a kernel.toml may say. `kernel_toml.py` reads by these tables and `kernel_schema.py` publishes them.
EXTENSION = "torch-extension"
LANGUAGES = ("cuda", "triton", EXTENSION)
# Languages whose compiler runs nothing of a source and no other program: no process of a build is left when it has ended.
INERT = frozenset({"cuda"})
FEATURES = ("none", "arch", "family")
FIELDS = {
    "definition": "schema language sources headers shared_headers spec knobs derived options target entry",
    "target": "cuda features hip",
    "entry": "name summary function knob_defaults arguments launch",
    "extension": "name summary",  # its entry
}
AXIS_FIELDS = {kind: "type min max values default" if kind == "int" else "type values default" for kind in AXIS_TYPES}
ARGUMENT_FIELDS = {
    "pointer": "name type dtype mutated nullable contiguous align",
    **{kind: "name type divisible_by" if kind[0] in "iu" else "name type" for kind in SCALARS},
    "struct": "name type size_bytes",
    "tensor_map": "name type",
    "constexpr": "name type value",
}
OPTION_FIELDS = {
    "cuda": "flags",
    "triton": "num_warps num_stages maxnreg",
    EXTENSION: "cflags cuda_cflags ldflags arches stable_abi binding",
}
LAUNCH_FIELDS = {"cuda": "grid block shared_bytes", "triton": "grid", EXTENSION: ""}
# Types of arguments a language does not have: CUDA takes template arguments in `function`.
LACKING = {"cuda": ("constexpr",), "triton": ("struct", "tensor_map"), EXTENSION: tuple(ARGUMENT_FIELDS)}
ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")  # of an extension
ALIGNS = (0, 2, 4, 8, 16, 32, 64, 128, 256)
TRITON_FACT = 16  # Triton knows this divisor and no other
LARGEST_STRUCT_BYTES = 4096
# Options that would change what kserve itself decides, or read a file that is not declared.
REFUSED_FLAG = re.compile(
    r"-{1,2}(I|include|isystem|pre-include|arch|gpu-arch|pch|use-pch|create-pch|no-cache|device-debug|G|lineinfo|generate-line"
    r"|time|fdevice-time|dlto|dlink)"
)

# The same for a C++ compiler, nvcc and a linker.
REFUSED_COMPILER_FLAG = re.compile(
    r"[^-]*/|@|-{1,2}(?:[ILMB]|include|imacros|i(?:quote|system|dirafter|prefix|withprefix)|[cSExTo]$|o[^p]|wrapper|specs|fplugin"
    r"|sysroot|keep|save-temps|dryrun|optf|options-file|ccbin|compiler-bindir|arch|gpu-|gencode|generate-code|code$|code="
    r"|objtemp|frandom-seed|time|dependency-|profile|fauto-profile|ftest-coverage|fprofile)"
)
# A directory outside of the kernel's folder, which a request names beside the definition; the flag holds no path.
ROOT = re.compile(r"\{root(\d{1,3})\}")
# What [options] may name besides: the version of the stable ABI, how Python finds what the library has.
STABLE_ABI = re.compile(r"2\.\d{1,2}")
BINDINGS = ("module", "operators")
CODE = re.compile(r"(?:sm|compute)_[1-9]\d{1,2}[af]?")


class Argument(NamedTuple):
    """One argument of an entry, in launch order.

    Fields:
        kind:         `pointer`, a scalar (`i32`, `f32`, …), `struct`, `tensor_map` or `constexpr`.
        dtype:        element type of a pointer: a dtype, or the name of a dtype axis.
        size_bytes:   of a struct.
        value:        of a constexpr.
        mutated:      the kernel writes through this pointer.
        nullable:     None is passed as a null pointer.
        contiguous:   a strided view is refused.
        align:        the fact that the pointer is divisible by this many bytes; 0 for no such fact.
        divisible_by: the fact that the integer is divisible by this; 0 for no such fact.
    """

    name: str
    kind: str
    dtype: str = ""
    size_bytes: int = 0
    value: Expression | None = None
    mutated: bool = False
    nullable: bool = False
    contiguous: bool = True
    align: int = 0
    divisible_by: int = 0

    @property
    def has_fact(self) -> bool:
        return bool(self.align or self.divisible_by)


class Launch(NamedTuple):
    """How an entry is launched: integer expressions over integer arguments, spec, derived axes and constexprs."""

    grid: tuple[Expression, ...]
    block: tuple[Expression, ...] = ()  # CUDA only: Triton's comes from the compiled result
    shared_bytes: Expression | None = None  # dynamic; CUDA only

    def expressions(self) -> list[Expression]:
        return [*self.grid, *self.block, *([self.shared_bytes] if self.shared_bytes else [])]


class Entry(NamedTuple):
    """One kernel of a folder: what `get_kernel` finds by name."""

    name: str
    summary: str
    function: str
    arguments: tuple[Argument, ...]
    launch: Launch
    knobs: Mapping[str, Knob] = {}

    @property
    def has_facts(self) -> bool:
        return any(argument.has_fact for argument in self.arguments)

    @property
    def size_names(self) -> list[str]:
        """What `sizes` may name: the integer arguments."""
        return [argument.name for argument in self.arguments if SCALARS.get(argument.kind, "float")[0] in "iu"]

    def check_size(self, name: str) -> None:
        """Raises InvalidSpec for a name that no size has."""
        if name not in self.size_names:
            raise InvalidSpec(f"{self.name} has no size {name!r}: {closest(name, self.size_names)}")


class KernelDef(NamedTuple):
    """A kernel folder."""

    language: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    shared_headers: tuple[str, ...]
    axes: dict[str, Axis]
    derived: dict[str, Expression]
    options: dict[str, tuple[str, ...] | Expression]
    features: str
    minimum_cuda: int | None
    hip: tuple[str, ...]
    entries: dict[str, Entry]
    constraints: tuple[Expression, ...] = ()  # over axes and knobs

    def knob_values(self, entry: Entry, spec: Mapping[str, object], chosen: Values) -> dict[str, int]:
        """Every knob of the entry with its value under that spec. Raises: InvalidSpec."""
        return settle(entry.name, entry.knobs, self.constraints, spec=spec, chosen=chosen)

    def specialise(self, entry: Entry, wanted: Mapping[str, object], chosen: Values | None = None) -> Spec:
        """The full spec: the caller's values, defaults, then derived axes.

        Args:
            chosen: values of knobs; the others have their defaults.
        Raises: InvalidSpec.
        """
        spec = normalise_spec(entry.name, self.axes, wanted)
        knobs = self.knob_values(entry, spec, chosen or {})
        for name, expression in self.derived.items():
            try:
                spec[name] = expression.evaluate({**spec, **knobs})
            except InvalidDefinition as error:
                raise InvalidSpec(f"derived axis {name} of {entry.name}: {error.message}") from None
        return spec

    def resolve_target(self, entry: Entry, target: Target) -> Target:
        """The exact target this kernel is built for.

        Raises: UnsupportedTarget when the kernel is not made for that arch.
        """
        if self.language == EXTENSION and self.minimum_cuda is None:
            return host()
        if target.backend == "hip":
            if target.arch in self.hip:
                return target
            allowed = ", ".join(f"hip:{arch}" for arch in self.hip) or f"CUDA targets only ({self.language})"
        elif self.minimum_cuda is None or target.backend != "cuda":
            allowed = ", ".join(f"hip:{arch}" for arch in self.hip)
        elif target.capability >= self.minimum_cuda:
            # Triton compiles for the exact arch wherever one exists: naming it otherwise would name other bytes.
            return target.with_features("arch" if self.language == "triton" else self.features)
        else:
            allowed = f"cuda:sm_{self.minimum_cuda} and newer"
        raise UnsupportedTarget(f"{entry.name} is not made for {target}", facts={"allowed": allowed})
