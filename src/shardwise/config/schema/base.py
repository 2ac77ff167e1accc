"""Base class of a section, and the types of its keys.

Invariant: nothing is converted silently, and no unknown key is dropped. The only conversions lose nothing and occur in
published configurations: `5e8` for an integer, a tuple for a list, `torch.bfloat16` or `"bfloat16"` for `"bf16"`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, WrapValidator

from shardwise.errors import ConfigError, ConflictError
from shardwise.units import parse_size

AUTO = "auto"
MASK = "***"
"""Replaces a secret where a configuration is shown or stored. As input it counts as absent."""

LARGEST_INT = (1 << 63) - 1
"""Largest integer: it fits 64 bits, as all counts and sizes of torch do."""

OTHER_NAMES = "x-other-names"
DEPRECATED_FOR = "x-deprecated-for"
NO_EFFECT = "x-no-effect"
DEFAULT_NOTE = "x-default-note"
FREE_FORM = "x-free-form"
IN_WORDS = "x-in-words"
SECRET = "x-secret"
STAGES = "x-stages"


class ConfigSection(BaseModel):
    """A JSON object of the configuration: no unknown keys, strict types, assignment is validated."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        defer_build=True,  # Sections are compiled at first use, which halves the import time.
        validate_assignment=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield the contradictions between valid values; `at` returns the path of another key of the section."""
        yield from ()

    def ordered(self, least: str, most: str, at: At) -> Contradictions:
        """Yield each lower bound above its upper bound; bounds may be lists, one item per parameter group."""
        bounds = (getattr(self, least), getattr(self, most))
        if None in bounds:
            return
        lengths = {len(value) for value in bounds if isinstance(value, list)} or {1}
        lows, highs = (value if isinstance(value, list) else [value] * max(lengths) for value in bounds)
        if len(lows) != len(highs):
            message = f"has {len(lows)} values and {at(most)} {len(highs)}; both need one for each group"
            yield least, message, ConfigError
            return
        for index, (low, high) in enumerate(zip(lows, highs, strict=True)):
            if low > high:
                where = f" in parameter group {index}" if lengths != {1} else ""
                yield least, f"is {low}, above {at(most)} = {high}{where}; exchange them", ConflictError
                return


class Arguments(ConfigSection):
    """Arguments of a class: those under `params` in a configuration, and those of the constructor."""

    @classmethod
    def called(cls) -> str:
        """Return the name of the optimizer or schedule that has these arguments."""
        return cls.__name__.removesuffix("Arguments")


Contradictions = Iterator[tuple[str, str, type[ConfigError]]]
"""Of each contradiction between keys: the key, problem and fix, class of the error."""
At = Callable[[str], str]
"""Returns the path of a key of a section in messages."""


def key(
    default: Any,
    description: str,
    *,
    names: tuple[str, ...] = (),
    deprecated_for: str = "",
    no_effect: str = "",
    default_note: str = "",
    free_form: bool = False,
    secret: bool = False,
    words: str = "",
    stages: tuple[int, ...] = (),
    **constraints: Any,
) -> Any:
    """Declare one key of a section.

    Args:
        default: value when the key is absent (`...` for a required key).
        description: one sentence for people, used in docs and JSON Schema.
        names: other accepted spellings of the same key.
        deprecated_for: dotted path (from the root) of the key that replaced this one.
        no_effect: reason why the key is accepted although it changes nothing in this library.
        default_note: reason for this default, if other libraries differ.
        free_form: the value is a dictionary with keys outside of this schema.
        secret: the value is shown and stored as `MASK`.
        words: the accepted values, where the type does not say them.
        stages: ZeRO stages that the key belongs to; a value other than the default is refused at others.
        constraints: passed to `pydantic.Field` (`ge`, `gt`, `le`, `lt`, `min_length`, ...).
    """
    extra: dict[str, Any] = {
        OTHER_NAMES: list(names),
        DEPRECATED_FOR: deprecated_for,
        NO_EFFECT: no_effect,
        DEFAULT_NOTE: default_note,
        FREE_FORM: free_form,
        SECRET: secret,
        IN_WORDS: words,
        STAGES: list(stages),
    }
    given = {name: value for name, value in extra.items() if value}
    return Field(
        default, description=description, json_schema_extra=given or None, exclude=bool(deprecated_for), **constraints
    )


def section(model: Callable[[], ConfigSection], description: str, *, names: tuple[str, ...] = ()) -> Any:
    """Declare a subsection, which has its defaults when absent."""
    extra: dict[str, Any] | None = {OTHER_NAMES: list(names)} if names else None
    return Field(default_factory=model, description=description, json_schema_extra=extra)


def integral(value: Any) -> Any:
    """Convert 5e8 to 500000000; leave other values to the type check."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def fits_64_bits(value: int) -> int:
    """Raise for an integer beyond 64 bits."""
    if abs(value) > LARGEST_INT:
        raise ValueError(f"more than {LARGEST_INT}")
    return value


def exact_integer(value: Any) -> Any:
    """Convert as `integral` before a `Literal` of integers, and refuse booleans, which equal 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are not integers")
    return integral(value)


def as_list(value: Any) -> Any:
    """Convert a tuple to a list; leave other values to the type check."""
    return list(value) if isinstance(value, tuple) else value


def one_or_many(value: Any) -> Any:
    """Convert one string to a list; leave other values to the type check."""
    return [value] if isinstance(value, str) else as_list(value)


def _or_like_a_number(value: Any, check: Callable[[Any], Any]) -> Any:
    """Check a one-element tensor (or NumPy scalar) as a number; return the tensor."""
    if isinstance(value, int | float | str) or not hasattr(type(value), "__float__"):
        return check(value)
    try:
        number = float(value)
    except (TypeError, RuntimeError) as error:
        raise ValueError("more than one number") from error
    check(number)
    return value


DTYPE_NAMES: dict[str, str] = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def _dtype_name(value: Any) -> Any:
    """Convert every accepted spelling, `torch.float16` itself included, to fp32 / fp16 / bf16."""
    if type(value).__name__ == "dtype" or isinstance(value, str):
        name = str(value).removeprefix("torch.").lower()
        return DTYPE_NAMES.get(name, name)
    return value


ExactInt = BeforeValidator(exact_integer)
Int = Annotated[int, BeforeValidator(integral), AfterValidator(fits_64_bits)]
"""An integer; a float with an integral value (1e9) is one."""
Size = Annotated[
    int,
    Field(gt=0),
    AfterValidator(fits_64_bits),
    BeforeValidator(lambda value: parse_size(value) if isinstance(value, str) else integral(value)),
    WithJsonSchema(
        {"type": ["integer", "string"], "exclusiveMinimum": 0, IN_WORDS: 'bytes, or a size such as "2GiB" or "500 MB"'}
    ),
]
"""A number of bytes, as an integer or with a unit."""
Flag = Annotated[
    bool, BeforeValidator(lambda value: bool(value) if isinstance(value, int | float) and value in (0, 1) else value)
]
"""True or false; some writers of JSON write 1 and 0."""
AsNumber = WrapValidator(_or_like_a_number)
"""Last in the type of a number that may be a tensor, as a learning rate of PyTorch's optimizers."""
_AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Anything = Annotated[Any, _AsTuple]
"""An unchecked value; a list becomes a tuple."""
Number = Annotated[int | float, WithJsonSchema({"type": "number"}), AsNumber]
NotNegative = Annotated[float, Field(ge=0), AsNumber]
PartOfOne = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[PartOfOne, PartOfOne], _AsTuple, WithJsonSchema({IN_WORDS: "two numbers in [0, 1)"})]
"""Decay rates of two averages."""
_NEVER = {"type": "number", "minimum": 1e308, "description": "Infinity: never."}
StepCount = (
    Annotated[int, BeforeValidator(integral), Field(ge=0)]
    | Annotated[float, Field(ge=math.inf, allow_inf_nan=True), WithJsonSchema(_NEVER)]
)
"""A number of steps; infinity means never."""
Strings = Annotated[list[str], BeforeValidator(as_list)]
Ints = Annotated[list[Int], BeforeValidator(as_list)]
Names = Annotated[
    list[str],
    BeforeValidator(one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
DType = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(_dtype_name),
    WithJsonSchema(
        {
            "enum": [*DTYPE_NAMES, *(f"torch.{name}" for name in ("float32", "float16", "bfloat16"))],
            IN_WORDS: 'one of "fp32", "fp16", "bf16" (other usual names of these types work too)',
        }
    ),
]
"""A floating-point type by any of its usual names; normalised to fp32, fp16 or bf16."""
LEVELS = ("debug", "info", "warning", "error", "critical")
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    WithJsonSchema({"enum": [word for level in LEVELS for word in (level, level.upper())]}),
]
"""A level of the `logging` module by name, in any case."""
